"""What a command has to do once in a process, which children of the server need not do again: reading all sweeps."""

import forked  # noqa: F401

from mxstudy import cli

cli.register(cli.SWEEPS)

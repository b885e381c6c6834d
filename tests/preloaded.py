"""What a command has to do once in a process, which children of the server need not do again: reading all sweeps."""

from mxstudy import cli

cli.register(cli.SWEEPS, [f"+sweep={path.stem}" for path in cli.SWEEPS.glob("*.yaml")])

"""Do what a command must do once in a process, and children of the server need not repeat: reading all sweeps."""

from mxstudy import cli

cli.register(cli.SWEEPS, [f"+sweep={path.stem}" for path in cli.SWEEPS.glob("*.yaml")])

"""Do what a command must do once in a process, and children of the server need not repeat: reading all sweeps."""

from mxstudy.cli import registered
from mxstudy.config import conf_folders

registered.register(conf_folders.SWEEPS, [f"+sweep={path.stem}" for path in conf_folders.SWEEPS.glob("*.yaml")])

"""python -m mxstudy, and the command mxstudy."""

from __future__ import annotations

import importlib.metadata
import sys

from mxstudy import scripts
from mxstudy.reader import ConfigError


def main() -> None:
    """Run the command line; what needs neither Hydra nor torch is done without them."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"mxstudy {importlib.metadata.version('mxstudy')}")
    elif words[:1] and words[0] in scripts.COMMANDS:
        try:
            scripts.run(words)
        except ConfigError as error:
            sys.exit(str(error))
    else:
        from mxstudy import cli  # imports Hydra

        cli.main()


if __name__ == "__main__":
    main()

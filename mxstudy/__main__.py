"""python -m mxstudy, and the command mxstudy."""

from __future__ import annotations

import importlib.metadata
import os
import sys

from mxstudy import scripts
from mxstudy.reader import ConfigError


def main() -> None:
    """Run the command line; commands that need neither Hydra nor torch run without loading them."""
    words = sys.argv[1:]
    first = words[0] if words else ""
    try:
        if words == ["--version"]:
            print(f"mxstudy {importlib.metadata.version('mxstudy')}")
        elif first == "completion":
            from mxstudy import completion  # imports the schema

            completion.main(words[1:])
        elif first in scripts.COMMANDS:
            scripts.run(words)
        else:
            from mxstudy.cli.main import main as main_of_cli  # imports Hydra

            main_of_cli()
    except ConfigError as error:
        sys.exit(str(error))
    except BrokenPipeError:  # the reader has enough, as `head` has; the interpreter would complain when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()

"""python -m mxstudy"""

from mxstudy.cli import main

if __name__ == "__main__":
    main()

"""``python -m tpkernels``: the command line, see ``tpkernels.cli``."""

from tpkernels.cli import main

if __name__ == "__main__":  # rank processes import this file too
    main()

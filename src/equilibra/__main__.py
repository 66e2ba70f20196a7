"""`python -m equilibra`, which is also how torchrun starts it."""

import sys

from equilibra.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

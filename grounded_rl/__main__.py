"""`python -m grounded_rl`: the command line, also under `accelerate launch -m`."""

import sys

from grounded_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())

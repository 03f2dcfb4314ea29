"""``python -m geoparam``, also for torchrun and accelerate launch with ``-m geoparam``."""

import sys

from geoparam_lab.cli import main

if __name__ == "__main__":
    sys.argv[0] = "geoparam"  # not __main__.py: it is shown in help, and kept with every run
    main()

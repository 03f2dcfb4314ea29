"""The command `geoparam`, which Ctrl-C may end while torch is imported."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from geoparam import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()

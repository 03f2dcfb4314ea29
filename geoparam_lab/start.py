"""The installed command `geoparam`: Ctrl-C ends it quietly while it imports torch, for seconds."""

import contextlib
import os
import signal


def main() -> None:
    """Import what the command line needs, and run it."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else the shell has it ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from geoparam import cli

    with contextlib.suppress(ImportError):  # which main explains
        cli.app()
    signal.signal(signal.SIGINT, usual)
    cli.main()

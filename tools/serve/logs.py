"""How the processes of a server log."""

from __future__ import annotations

import logging


def set_up_logging() -> None:
    """Log warnings and errors of a server's process to standard error, one line each."""
    logging.basicConfig(level=logging.WARNING, format="sorl-serve: %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it switches its own debug messages on

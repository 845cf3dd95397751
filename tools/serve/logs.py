"""What a server's processes write to standard error."""

from __future__ import annotations

import logging


def set_up_logging() -> None:
    """Warnings and errors, a line each."""
    logging.basicConfig(level=logging.WARNING, format="sorl-serve: %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it turns its own debugging on

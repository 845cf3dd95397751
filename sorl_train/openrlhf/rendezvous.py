"""Where the workers of a model meet."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def rendezvous_port() -> int:
    """A free port at which rank 0 of a group of workers can listen minutes later.

    OpenRLHF asks the system when the worker starts, but opens the port after the vLLM engines have started. Meanwhile
    the many connections of Ray may take it: the system hands out the same ports (from 32768) to them. Ray's workers
    have 10002 to 19999. Raises ``RuntimeError`` if nothing is free between the two.
    """
    for port in random.SystemRandom().sample(range(20000, 32768), 1000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise RuntimeError("none of 1000 ports between 20000 and 32767 is free on this node")

"""Ways in which a file on a disk is damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def delete(path: Path) -> None:
    path.unlink()


def flip_a_bit(path: Path) -> None:
    """One bit, somewhere: the size stays."""
    content = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def become_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def become_a_link_to_itself(path: Path) -> None:
    """Reading it is an OSError that no permission of root's gets around."""
    path.unlink()
    path.symlink_to(path.name)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], None]] = [truncate, empty, delete, flip_a_bit, append]
DAMAGES += [become_a_dangling_link, become_a_link_to_itself, become_a_folder]

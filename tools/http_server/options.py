"""The options that every server has, where it listens, and how it logs."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sorl_env.commands.command import number, say, whole
from sorl_env.errors import UserError, install_command

MAX_HEAD_BYTES = 16 << 10  # of a request line with its headers


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, and its limits on clients."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = field(default=None, repr=False)  # what requests must carry
    max_body_bytes: int = 1 << 20
    stall_timeout_s: float = (
        20.0  # until a client is cut off that sends nothing, half a request, or reads no reply
    )
    max_connections: int = 4096  # of a process; further ones get 503
    drain_s: int = 30  # for requests in progress when the server is told to stop


def add_server_options(
    parser: argparse._ActionsContainer, port: int, *, drain_s: int = 30, max_body_kb: int = 1024
) -> None:
    """Add the options that `server_settings` reads, with these defaults."""
    add, end = parser.add_argument, "(default: %(default)s)"
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=port, help=f"port; 0 takes a free one {end}")
    add("--token_file", type=Path, help="file with a token that requests must carry")
    add("--max_body_kb", type=whole(1, 1 << 26), default=max_body_kb, help=f"largest body, in kB {end}")
    stalled = f"seconds until a client is cut off that sends half a request or does not read its reply {end}"
    add("--stall_timeout_s", type=number(above=0, high=86400), default=20.0, help=stalled)
    most = f"most connections of a process, below its limit of open files {end}"
    add("--max_connections", type=whole(1, 1 << 20), default=4096, help=most)
    drain = f"seconds to finish the requests in progress when the server stops {end}"
    add("--drain_s", type=whole(0, 86400), default=drain_s, help=drain)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings in a command line. Raises UserError if the token's file cannot be read."""
    return ServerSettings(
        host=args.host,
        port=args.port,
        token=None if args.token_file is None else read_token(args.token_file),
        max_body_bytes=args.max_body_kb << 10,
        stall_timeout_s=args.stall_timeout_s,
        max_connections=args.max_connections,
        drain_s=args.drain_s,
    )


def check_installed(packages: Sequence[str], extras: str) -> None:
    """Raise UserError, with the command that installs ``extras``, if one of the packages is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"these packages are not installed: {', '.join(missing)}; {install_command(extras)}")


def read_token(path: Path) -> str:
    """The token in a file. Raises UserError unless the file can be read and holds a single printable word."""
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token_file={path}: {error}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"token_file={path}: it must hold one word of printable ASCII characters")
    return token


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. Raises UserError if the address cannot be used. With ``shared``, other
    sockets of this user may be bound to the same port (SO_REUSEPORT); the kernel distributes the connections among
    those that listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"host={host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        what = f"cannot listen on {host}:{port} ({error.strerror})"
        raise UserError(f"{what}: stop what uses the port, or give another --port") from error
    return bound


def announce(command: str, settings: ServerSettings, port: int, *lines: str) -> None:
    """Print ``lines``, with the server's address for ``{url}``, and a warning if strangers can reach it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    for line in lines:
        print(f"{command}: {line.replace('{url}', f'http://{host}:{port}')}", flush=True)
    if settings.token is None and not is_loopback(settings.host):
        say(command, f"warning: anyone who can reach {settings.host} may ask: there is no --token_file")


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether this address, or name, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def set_up_logging(command: str) -> None:
    """Log warnings and errors of a server's process to standard error, one line each."""
    to_stderr = logging.StreamHandler()
    to_stderr.setLevel(logging.WARNING)  # bm25s turns its own debugging on
    logging.basicConfig(handlers=[to_stderr], format=f"{command}: %(message)s")

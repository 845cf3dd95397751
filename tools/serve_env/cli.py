"""``sorl-serve-env TASK``: serve a task as an environment of OpenEnv."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.command import Parser, add_search_options, number, run_command, say, whole
from sorl_env.errors import UserError
from sorl_env.registry import load_task
from sorl_env.task import ToolSettings
from sorl_env.task_options import TASK_HELP, read_task_args
from sorl_env.text_env import TextEnv, open_env
from sorl_tools.serve.cli import add_connection_options, connection_limits, read_token
from sorl_tools.serve.logs import set_up_logging
from sorl_tools.serve.server import bind

_NEEDED = ("openenv", "uvicorn", "websockets", "msgspec", "prometheus_client")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="sorl-serve-env",
        description="Serve a task as an environment of OpenEnv.",
        mappings=("task_args",),
    )
    add = parser.add_argument
    add("task", help=TASK_HELP)
    add("--data", help="a .jsonl(.gz) or .parquet file, a folder of them, or hf:owner/name")
    splits = "splits to serve (default: train test)"
    add("--split", nargs="+", default=["train", "test"], metavar="SPLIT", help=splits)
    add("--task_args.KEY", metavar="JSON", help='an argument of the task, as --task_args.hops "[1, 2]"')
    add_search_options(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=8000, help="port; 0 takes a free one (default: 8000)")
    add("--token_file", type=Path, help="file with a token that clients must send")
    add("--max_sessions", type=whole(1, 65536), default=256, help="most episodes at once (default: 256)")
    largest = "largest message or body of a client, in kB (default: 1024)"
    add("--max_message_kb", type=whole(1, 1 << 20), default=1024, help=largest)
    idle = "seconds without a message until a session is closed (default: 600)"
    add("--session_idle_s", type=number(above=0, high=86400), default=600.0, help=idle)
    drain = "seconds to finish the requests in progress at the end (default: 5)"
    add("--drain_s", type=whole(0, 86400), default=5, help=drain)
    add_connection_options(parser)
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    set_up_logging()
    return run_command("sorl-serve-env", _serve, argv)


def _serve(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"these packages are not installed: {', '.join(missing)}; pip install 'sorl[openenv]', in an environment "
            "of its own"
        )
    token = None if args.token_file is None else read_token(args.token_file)
    envs = _open(args)
    try:
        with bind(args.host, args.port) as bound:
            bound.listen()
            _announce(args.host, bound.getsockname()[1], args.task, token)
            _run(_application(args, envs, token), args, bound)
    finally:
        for env in envs.values():
            env.close()
    return 0


def _open(args: argparse.Namespace) -> dict[str, TextEnv]:
    """An environment for each split."""
    task = load_task(args.task, **read_task_args(args))
    settings = ToolSettings(corpus=args.corpus, search_url=args.search_url, tools=tuple(args.tools))
    return {
        split: open_env(task, data=args.data, split=split, tool_settings=settings) for split in args.split
    }


def _application(args: argparse.Namespace, envs: Mapping[str, TextEnv], token: str | None) -> Any:
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.types import ConcurrencyConfig

    from sorl_tools.serve_env.environment import TaskEnvironment, TaskState, TextAction, TextObservation
    from sorl_tools.serve_env.guard import Guard

    # not OpenEnv's create_app, which adds a web interface that asks for no token if a variable says so
    app = create_fastapi_app(
        lambda: TaskEnvironment(envs),
        TextAction,
        TextObservation,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=args.max_sessions, session_timeout=args.session_idle_s
        ),
        env_name=next(iter(envs.values())).task.name.replace("/", "_"),
        state_cls=TaskState,
    )
    return Guard(
        app,
        token=token,
        idle_s=args.session_idle_s,
        max_body_bytes=args.max_message_kb << 10,
        body_timeout_s=args.body_timeout_s,
    )


def _run(app: Any, args: argparse.Namespace, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    import uvicorn

    from sorl_tools.serve.connections import limited_config

    config = limited_config(
        app,
        connection_limits(args),
        lambda reason: None,
        drain_s=args.drain_s,
        max_message_bytes=args.max_message_kb << 10,
    )
    config.lifespan = "on"  # OpenEnv's server ends its idle HTTP sessions from there
    # after its shutdown, uvicorn raises the signal again for the handler that it found
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)


def _announce(host: str, port: int, task: str, token: str | None) -> None:
    where = f"[{host}]" if ":" in host else host
    print(f"sorl-serve-env: http://{where}:{port}: {task}; --task openenv:http://{where}:{port}", flush=True)
    if token is None and host not in _LOOPBACK:
        said = f"warning: anyone who can reach {host} may play, because there is no --token_file"
        say("sorl-serve-env", said)


if __name__ == "__main__":
    sys.exit(main())

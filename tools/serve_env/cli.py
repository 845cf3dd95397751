"""``sorl-serve-env TASK``: serve a task as an environment of OpenEnv."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sorl_env.commands.command import Parser, number, run_command, whole
from sorl_env.commands.task_options import add_task_options, open_named_task
from sorl_env.envs.text_env import TextEnv
from sorl_tools.http_server.options import (
    ServerSettings,
    add_server_options,
    announce,
    bind,
    check_installed,
    server_settings,
    set_up_logging,
)

PORT = 8303
_NEEDED = ("openenv", "httptools", "starlette", "uvicorn", "websockets")


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="sorl-serve-env",
        description="Serve a task as an environment of OpenEnv.",
        mappings=("task_args",),
    )
    add = parser.add_argument
    add_task_options(parser, many_splits=True)
    add("--max_sessions", type=whole(1, 65536), default=256, help="most episodes at once (default: 256)")
    idle = "seconds without a message until a session is closed (default: 600)"
    add("--session_idle_s", type=number(above=0, high=86400), default=600.0, help=idle)
    # a WebSocket's message has the limit of a body
    add_server_options(parser, PORT, drain_s=5)
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    set_up_logging("sorl-serve-env")
    return run_command("sorl-serve-env", _serve, argv)


def _serve(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    check_installed(_NEEDED, "openenv")
    from sorl_tools.http_server.server import Server

    settings = server_settings(args)
    envs = dict(zip(args.split, open_named_task(args, *args.split), strict=True))
    try:
        with bind(settings.host, settings.port) as bound:
            bound.listen()
            line = f"{{url}}: {args.task}; --task openenv:{{url}}"
            announce("sorl-serve-env", settings, bound.getsockname()[1], line)
            app = _application(args, envs, settings)
            Server(app, settings, max_message_bytes=settings.max_body_bytes).serve_on(bound)
    finally:
        for env in envs.values():
            env.close()
    return 0


def _application(args: argparse.Namespace, envs: Mapping[str, TextEnv], settings: ServerSettings) -> Any:
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.types import ConcurrencyConfig

    from sorl_tools.http_server.app import Guard
    from sorl_tools.serve_env.environment import TaskEnvironment, TaskState, TextAction, TextObservation

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
    return Guard(app, settings, websocket_idle_s=args.session_idle_s)


if __name__ == "__main__":
    sys.exit(main())

"""``sorl-serve-agent --model ..``: a policy and its tools behind OpenAI's ``/v1/chat/completions`` and a chat page."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sorl_env.command import run_command, say, whole
from sorl_env.errors import UserError
from sorl_tools.serve.cli import add_connection_options, connection_limits

try:
    from sorl_train.evaluate.arguments import (
        add_one_task_options,
        find_source,
        make_env,
        make_parser,
        make_policy,
    )
except ModuleNotFoundError as missing:  # the core alone is installed
    raise SystemExit(
        f"sorl-serve-agent needs the package {missing.name!r}: pip install 'sorl[train]'"
    ) from missing

from sorl_train.serve_agent.agent import Agent
from sorl_train.serve_agent.app import App

if TYPE_CHECKING:
    from sorl_tools.serve.connections import ConnectionLimits

_NEEDED = ("msgspec", "prometheus_client", "uvicorn")  # sorl_tools.serve's
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 0 ended by SIGTERM, 2 wrong usage, 130 interrupted."""
    to_stderr = logging.StreamHandler()
    to_stderr.setLevel(logging.WARNING)  # bm25s turns its own debugging on
    logging.basicConfig(handlers=[to_stderr], format="sorl-serve-agent: %(message)s")
    return run_command("sorl-serve-agent", lambda words: _serve(_parser().parse_args(words)), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("sorl-serve-agent", description=__doc__)
    server = parser.add_argument_group("the server")
    add = server.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=8000, help="0 chooses a free port (default: 8000)")
    add("--token_file", type=Path, help="requests must carry the token in this file")
    add("--served_name", metavar="NAME", help="the model's name in requests (default: the folder's)")
    waiting = "questions that may wait for one of sampler.max_concurrency; more get a 503 (default: 256)"
    add("--max_waiting", type=whole(0), default=256, help=waiting)
    drain = "seconds to finish open dialogues at the end (default: 30)"
    add("--drain_s", type=whole(0, 86400), default=30, help=drain)
    add_connection_options(server)
    add_one_task_options(parser)
    return parser


def _serve(args: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; pip install 'sorl[train,search]'")
    from sorl_tools.serve.cli import read_token
    from sorl_tools.serve.server import bind

    token = None if args.token_file is None else read_token(args.token_file)
    source = find_source(args, args.model)
    env = make_env(args, source)
    name = args.served_name or (source.label if source else args.model_name)
    try:
        with bind(args.host, args.port) as bound:  # before the model is loaded, since the port may be in use
            policy = make_policy(args, source, [env])
            agent = Agent(policy, env, seed=args.seed, max_waiting=args.max_waiting)
            with agent.running():
                bound.listen()
                _say(args.host, bound.getsockname()[1], f"{name} on {env.task.name}", token)
                limits = connection_limits(args)
                app = App(agent, name, token=token, body_timeout_s=limits.body_timeout_s)
                _run(app, agent, bound, limits, args.drain_s)
    finally:
        env.close()
    return 0


def _run(app: App, agent: Agent, bound: socket.socket, limits: ConnectionLimits, drain_s: int) -> None:
    """Serve until SIGTERM or SIGINT, then finish the open dialogues; or until the agent fails."""
    import uvicorn

    from sorl_tools.serve.connections import limited_config

    config = limited_config(app, limits, app.refused, drain_s=drain_s)
    # After its shutdown, uvicorn raises the signal again for the handler that it found.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    agent.on_failure = end
    if agent.failed:  # before it could say so
        end()
    try:
        server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(host: str, port: int, what: str, token: str | None) -> None:
    where = f"[{host}]" if ":" in host else host
    print(f"sorl-serve-agent: http://{where}:{port}/v1: {what}", flush=True)
    print(f"sorl-serve-agent: http://{where}:{port}/ is a page to ask on", flush=True)
    if token is None and host not in _LOOPBACK:
        say(
            "sorl-serve-agent",
            f"warning: anyone who can reach {host} may ask, because there is no --token_file",
        )


if __name__ == "__main__":
    sys.exit(main())

"""``sorl-serve-agent --model ..``: a policy and its tools behind OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sorl_env.commands.command import run_command, whole
from sorl_env.errors import install_command
from sorl_tools.http_server.options import (
    add_server_options,
    announce,
    bind,
    check_installed,
    server_settings,
    set_up_logging,
)

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
        f"sorl-serve-agent needs the package {missing.name!r}: {install_command('train')}"
    ) from missing

ABOUT = "Serve a policy and its tools behind OpenAI's /v1/chat/completions."
PORT = 8302
_NEEDED = ("httptools", "starlette", "uvicorn")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 0 ended by SIGTERM, 2 wrong usage, 130 interrupted."""
    set_up_logging("sorl-serve-agent")
    return run_command("sorl-serve-agent", lambda words: _serve(_parser().parse_args(words)), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("sorl-serve-agent", usage="sorl-serve-agent [OPTION ..]", description=ABOUT)
    server = parser.add_argument_group("the server")
    about = "the model's name in requests (default: its folder)"
    server.add_argument("--served_name", metavar="NAME", help=about)
    about = "questions that may wait; more get a 503 (default: 256)"
    server.add_argument("--max_waiting", type=whole(0), default=256, metavar="N", help=about)
    add_server_options(server, PORT)
    add_one_task_options(parser)
    return parser


def _serve(args: argparse.Namespace) -> int:
    check_installed(_NEEDED, "train,search")
    from sorl_tools.http_server.server import Server
    from sorl_train.serve_agent.agent import Agent
    from sorl_train.serve_agent.app import agent_app

    settings = server_settings(args)
    source = find_source(args, args.model)
    env = make_env(args, source)
    name = args.served_name or (source.label if source else args.model_name)
    try:
        # before the model is loaded: the port may be in use
        with bind(settings.host, settings.port) as bound:
            policy = make_policy(args, source, [env])
            agent = Agent(policy, env, seed=args.seed, max_waiting=args.max_waiting)
            server = Server(agent_app(agent, name, settings), settings)
            agent.on_failure = server.stop
            with agent.running():
                bound.listen()
                port = bound.getsockname()[1]
                announce("sorl-serve-agent", settings, port, f"{{url}}/v1: {name} on {env.task.name}")
                server.serve_on(bound)
    finally:
        env.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

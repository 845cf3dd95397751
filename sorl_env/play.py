"""``sorl-play NAME``: play an episode in the terminal, in place of the policy."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence

from sorl_env.command import (
    FAILED,
    INTERRUPTED,
    Parser,
    add_task_options,
    read_task_args,
    run_command,
    seed,
    whole,
)
from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.interrupts import run_async
from sorl_env.registry import load_task
from sorl_env.session_env import ACTION, SessionEnv
from sorl_env.step import StepResult
from sorl_env.task import ToolSettings
from sorl_env.text import quoted
from sorl_env.text_env import TextEnv, need_tools, open_env
from sorl_env.tool import ToolUnavailableError

_RULE = "-" * 80

Player = Callable[[Sequence[str]], str | None]


def play(env: ToolUseEnv, player: Player) -> StepResult | None:
    """Play the episode that ``env`` has just begun; returns its last step, or None if the player left.

    Args:
        player: maps the observations so far to the full text of the next turn, or to None to leave.
    """
    observations: list[str] = []
    while (turn := player(observations)) is not None:
        result = env.step(turn)
        parsed = result.info["parsed"]
        if parsed.error is not None:
            print(f"[invalid turn: {parsed.error.value}: {parsed.detail}]")
        if result.terminated or result.truncated:
            return result
        observations.append(result.observation)
        print(result.observation.strip())
    return None


class Person:
    """Reads turns from standard input: as shortcuts, or as full turns in the policy's own format."""

    def __init__(self, tools: Sequence[str]) -> None:
        self._shortcuts = {name: name for name in tools} | {"a": "answer"}
        self._ends = tuple(f"</{name}>" for name in (*tools, "answer"))
        lines = [
            "  a ANSWER        answer",
            "  <think>..       a full turn, over several lines if you like; an empty line ends it",
            "  q               quit",
        ]
        if tools:
            self._shortcuts["s"] = tools[0]
            also = [f"  {name} ARGUMENT" for name in tools[1:]]
            lines = [f"  s ARGUMENT      call {tools[0]}", *also, *lines]
        self.help = "\n".join(lines)

    def __call__(self, observations: Sequence[str]) -> str | None:
        """The next turn; None at ``q`` or at the end of the input."""
        while (line := _read("> ")) is not None and line.strip() != "q":
            line = line.strip()
            if line.startswith("<"):
                return self._read_turn(line)
            word, _, argument = line.partition(" ")
            if word in self._shortcuts and argument.strip():
                action = self._shortcuts[word]
                return f"<think>played by hand</think>\n<{action}>{argument.strip()}</{action}>"
            print(self.help)
        return None

    def _read_turn(self, first: str) -> str:
        """Read the rest of a turn, which ends with its closing tag, an empty line, or the end of the input."""
        lines = [first]
        while lines[-1] and not lines[-1].endswith(self._ends):
            lines.append((_read("| ") or "").rstrip())
        return "\n".join(lines).rstrip()


def _read(prompt: str) -> str | None:
    """A line of input, or None at its end. Input that comes from a pipe is printed, as typed input is."""
    if sys.stdin is None:
        return None  # the command was started with a closed standard input
    try:
        line = input(prompt)
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        print(line)
    return line


def _expert(env: ToolUseEnv) -> Player:
    """The task's scripted expert as a player; it prints the turns that it writes."""
    expert = env.task.expert
    if expert is None:
        raise _no_expert(env)

    def next_turn(observations: Sequence[str]) -> str | None:
        turn = expert(env.example, observations)
        print(
            "The expert gives up: it has no demonstration of this example." if turn is None else f"> {turn}"
        )
        return turn

    return next_turn


def _no_expert(env: TextEnv) -> UserError:
    return UserError(f"task {env.task.name} has no scripted expert: leave --auto out and play yourself")


def _summary(env: TextEnv, result: StepResult | None, show_answer: bool) -> str:
    lines = [_RULE]
    if result is None:
        lines.append("You left before the end: no reward.")
    else:
        items = ", ".join(f"{name} {value:g}" for name, value in result.info["reward_items"].items())
        reason, turns = result.info["stop_reason"], result.info["turn"] + 1
        lines.append(
            f"Reward {result.reward:g} ({items or 'no items'}); ended by {reason} after {turns} turns."
        )
        if result.info.get("error"):
            lines.append(f"Error: {result.info['error']}")
    if show_answer:
        lines.append(f"Right answer: {' | '.join(env.example.golden_answers) or 'unknown'}")
    return "\n".join(lines)


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    about = "Play an episode of a task in the terminal."
    parser = Parser(prog="sorl-play", description=about, mappings=("task_args",))
    add_task_options(parser)
    parser.add_argument("--index", type=whole(0), help="number of the example (default: drawn at random)")
    parser.add_argument("--seed", type=seed, help="seed of the random draws")
    parser.add_argument("--show_answer", action="store_true", help="print the right answer at the end")
    parser.add_argument("--auto", choices=["expert"], help="let the task's scripted expert play")
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_command("sorl-play", _play, argv, refused=FAILED)


def _play(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    settings = ToolSettings(corpus=args.corpus, search_url=args.search_url, tools=tuple(args.tools))
    task = load_task(args.task, **read_task_args(args))
    env = open_env(task, data=args.data, split=args.split, tool_settings=settings)
    try:
        if isinstance(env, SessionEnv):
            result = run_async(_play_elsewhere(env, args))
        else:
            result = _play_here(need_tools(env, "sorl-play"), args)
        print(_summary(env, result, args.show_answer))
        return 0
    except KeyboardInterrupt:
        print("\nStopped.")
        return INTERRUPTED
    finally:
        env.close()


def _play_here(env: ToolUseEnv, args: argparse.Namespace) -> StepResult | None:
    prompt, info = env.reset(seed=args.seed, options=None if args.index is None else {"index": args.index})
    person = Person(info["tools"])
    player: Player = _expert(env) if args.auto else person
    print(f"{env.task.name}, example {info['index']} of {len(env.examples)} ({info['source']})")
    print(f"{_RULE}\n{prompt}\n{_RULE}")
    if not args.auto:
        print(f"You have {env.limits.max_turns} turns.\n{person.help}\n{_RULE}")
    return play(env, player)


async def _play_elsewhere(env: SessionEnv, args: argparse.Namespace) -> StepResult | None:
    """Play an environment from elsewhere, where a line that is typed is an action."""
    if args.auto:
        raise _no_expert(env)
    seed_ = args.seed or 0
    index = seed_ % len(env.examples) if args.index is None else args.index
    if index >= len(env.examples):
        raise UserError(f"--index {index}: there are {len(env.examples)} episodes")
    turns = env.limits.max_turns
    print(f"{env.task.name}, episode {index}; a line is an action, q quits. You have {turns} turns.")
    try:
        print(await env.areset(index, seed_))
        while (line := await asyncio.to_thread(_read, "> ")) is not None and line.strip() != "q":
            line = line.strip()
            if env.format == "action" and not line.startswith("<"):
                line = f"<{ACTION}>{line}</{ACTION}>"
            result = await env.astep(line)
            print(result.observation.strip() or f"[no reply to {quoted(line)}]")
            if result.terminated or result.truncated:
                return result
        return None
    except ToolUnavailableError as error:
        raise UserError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())

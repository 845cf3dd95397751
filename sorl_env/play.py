"""``sorl-play NAME``: play an episode in the terminal, in place of the policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from sorl_env.command import FAILED, INTERRUPTED, Parser, run_command, seed, whole
from sorl_env.env import StepResult, ToolUseEnv
from sorl_env.env_parts import add_task_options, read_task_args
from sorl_env.errors import UserError
from sorl_env.interrupts import run_async
from sorl_env.play_session import play_session
from sorl_env.registry import load_task
from sorl_env.session_env import SessionEnv
from sorl_env.task import ToolSettings
from sorl_env.text_env import TextEnv, need_tools, open_env

_RULE = "-" * 80

Player = Callable[[Sequence[str]], str | None]


def play(env: ToolUseEnv, player: Player) -> StepResult | None:
    """Play the episode that ``env`` has just begun; returns its last step, or None if the player left.

    Args:
        player: maps the observations so far to the full text of the next turn, or to None to leave.
    """
    observations: list[str] = []
    while True:
        turn = player(observations)
        if turn is None:
            return None
        result = env.step(turn)
        parsed = result.info["parsed"]
        if parsed.error is not None:
            print(f"[invalid turn: {parsed.error.value}: {parsed.detail}]")
        if result.terminated or result.truncated:
            return result
        observations.append(result.observation)
        print(result.observation.strip())


class Person:
    """Reads turns from standard input: as shortcuts, or as full turns in the policy's own format."""

    def __init__(self, tools: Sequence[str]) -> None:
        self._tools = tools

    def __call__(self, observations: Sequence[str]) -> str | None:
        """The next turn; None at ``q`` or at the end of the input."""
        while True:
            try:
                line = _read("> ").strip()
            except EOFError:
                print()
                return None
            if line == "q":
                return None
            if line.startswith("<"):
                return self._read_turn(line)
            word, _, argument = line.partition(" ")
            action = self._action(word)
            if action is not None and argument.strip():
                return f"<think>played by hand</think>\n<{action}>{argument.strip()}</{action}>"
            print(self.help())

    def help(self) -> str:
        """A description of the shortcuts."""
        names = [f"  {name} ARGUMENT" for name in self._tools]
        if self._tools:
            names[0] = f"  s ARGUMENT      call {self._tools[0]}" + (
                "" if len(names) == 1 else f" (or {names[0].strip()})"
            )
        return "\n".join(
            [
                *names,
                "  a ANSWER        answer",
                "  <think>..       a full turn, over several lines if you like; an empty line ends it",
                "  q               quit",
            ]
        )

    def _action(self, word: str) -> str | None:
        """The name of the block that a shortcut stands for; None for an unknown word."""
        if word == "a":
            return "answer"
        if word == "s" and self._tools:
            return self._tools[0]
        return word if word in self._tools else None

    def _read_turn(self, first: str) -> str:
        """Read the rest of a turn, which ends with its closing tag, an empty line, or the end of the input."""
        lines = [first]
        ends = tuple(f"</{name}>" for name in (*self._tools, "answer"))
        while lines[-1] and not lines[-1].endswith(ends):
            try:
                lines.append(_read("| ").rstrip())
            except EOFError:
                break
        return "\n".join(lines).rstrip()


def _read(prompt: str) -> str:
    """A line of input. Input that comes from a pipe is printed, as typed input is."""
    if sys.stdin is None:
        raise EOFError  # the command was started with a closed standard input
    line = input(prompt)
    if not sys.stdin.isatty():
        print(line)
    return line


def _expert(env: ToolUseEnv) -> Player:
    """The task's scripted expert as a player; it prints the turns that it writes.

    Raises:
        UserError: the task has no expert.
    """
    expert = env.task.expert
    if expert is None:
        raise UserError(f"task {env.task.name} has no scripted expert: leave --auto out and play yourself")

    def next_turn(observations: Sequence[str]) -> str | None:
        turn = expert(env.example, observations)
        print(
            "The expert gives up: it has no demonstration of this example." if turn is None else f"> {turn}"
        )
        return turn

    return next_turn


def _summary(env: TextEnv, result: StepResult | None, show_answer: bool) -> str:
    lines = [_RULE]
    if result is None:
        lines.append("You left before the end: no reward.")
    else:
        items = ", ".join(f"{name} {value:g}" for name, value in result.info["reward_items"].items())
        reason, turns = result.info["stop_reason"], result.info["turn"] + 1
        end = f"ended by {reason} after {turns} turns"
        lines.append(f"Reward {result.reward:g} ({items or 'no items'}); {end}.")
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
            return _play_elsewhere(env, args)
        return _play_once(need_tools(env, "sorl-play"), args)
    finally:
        env.close()


def _play_elsewhere(env: SessionEnv, args: argparse.Namespace) -> int:
    if args.auto:
        raise UserError(f"task {env.task.name} has no scripted expert: leave --auto out and play yourself")
    seed_ = args.seed or 0
    index = seed_ % len(env.examples) if args.index is None else args.index
    if index >= len(env.examples):
        raise UserError(f"--index {index}: there are {len(env.examples)} episodes")
    print(
        f"{env.task.name}, episode {index}; a line is an action, q quits. You have {env.limits.max_turns} turns."
    )

    def read() -> str | None:
        try:
            line = _read("> ").strip()
        except EOFError:
            return None
        return None if line == "q" else line

    try:
        result = run_async(play_session(env, index, seed_, read, print))
    except KeyboardInterrupt:
        print("\nStopped.")
        return INTERRUPTED
    print(_summary(env, result, args.show_answer))
    return 0


def _play_once(env: ToolUseEnv, args: argparse.Namespace) -> int:
    options = None if args.index is None else {"index": args.index}
    prompt, info = env.reset(seed=args.seed, options=options)
    person = Person(info["tools"])
    player: Player = _expert(env) if args.auto else person
    print(f"{env.task.name}, example {info['index']} of {len(env.examples)} ({info['source']})")
    print(f"{_RULE}\n{prompt}\n{_RULE}")
    if not args.auto:
        print(f"You have {env.limits.max_turns} turns.\n{person.help()}\n{_RULE}")
    try:
        result = play(env, player)
    except KeyboardInterrupt:
        print("\nStopped.")
        return INTERRUPTED
    print(_summary(env, result, args.show_answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())

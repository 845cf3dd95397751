"""``sorl-play NAME``: play an episode in the terminal, in place of the policy."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Sequence

from sorl_env.bridges.session_env import ACTION, SessionEnv
from sorl_env.commands.command import FAILED, INTERRUPTED, Parser, run_command, seed, whole
from sorl_env.commands.task_options import add_task_options, open_named_task
from sorl_env.envs.step import TurnInfo
from sorl_env.envs.text_env import TextEnv
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.tool.tool import ToolUnavailableError

_RULE = "-" * 80

# Maps the replies so far to the full text of the next turn, or to None to leave.
Player = Callable[[Sequence[str]], str | None]


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
    except UnicodeDecodeError as error:
        raise UserError(f"the input is not {error.encoding} text ({error.reason}): correct it") from error
    if not sys.stdin.isatty():
        print(line)
    return line


def _expert(env: TextEnv) -> Player:
    expert = env.task.expert
    if expert is None:
        raise UserError(f"task {env.task.name} has no scripted expert: leave --auto out and play yourself")

    def next_turn(observations: Sequence[str]) -> str | None:
        turn = expert(env.example, observations)
        print("The expert gives up: it has no demonstration here." if turn is None else f"> {turn}")
        return turn

    return next_turn


def _person_elsewhere(env: SessionEnv) -> Player:
    """A person in an environment from elsewhere, where a line that is typed is an action."""

    def next_turn(observations: Sequence[str]) -> str | None:
        line = _read("> ")
        if line is None or line.strip() == "q":
            return None
        plain = env.format == "action" and not line.lstrip().startswith("<")
        return f"<{ACTION}>{line.strip()}</{ACTION}>" if plain else line.strip()

    return next_turn


def _summary(env: TextEnv, result: TurnInfo | None, show_answer: bool) -> str:
    lines = [_RULE]
    if result is None:
        lines.append("You left before the end: no reward.")
    else:
        items = ", ".join(f"{name} {value:g}" for name, value in result.reward_items.items()) or "no items"
        assert result.stop_reason is not None
        ended = f"ended by {result.stop_reason.value} after {result.turn + 1} turns"
        lines.append(f"Reward {result.reward:g} ({items}); {ended}.")
        if result.error:
            lines.append(f"Error: {result.error}")
    if show_answer:
        lines.append(f"Right answer: {' | '.join(env.example.golden_answers) or 'unknown'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_command("sorl-play", _play, argv, refused=FAILED)


def _play(argv: Sequence[str]) -> int:
    about = "Play an episode of a task in the terminal."
    parser = Parser(prog="sorl-play", description=about, mappings=("task_args",))
    add_task_options(parser)
    parser.add_argument("--index", type=whole(0), help="number of the example (default: drawn at random)")
    parser.add_argument("--seed", type=seed, help="seed of the random draws")
    parser.add_argument("--show_answer", action="store_true", help="print the right answer at the end")
    parser.add_argument("--auto", choices=["expert"], help="let the task's scripted expert play")
    args = parser.parse_args(argv)
    (env,) = open_named_task(args, args.split)
    # The loop waits for the environment alone, so that Ctrl-C at a question ends the command at once.
    loop = asyncio.new_event_loop()
    try:
        result = _play_episode(env, args, loop)
        print(_summary(env, result, args.show_answer))
        return 0
    except ToolUnavailableError as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        print("\nStopped.")
        return INTERRUPTED
    finally:
        env.end_episode()
        env.close()
        loop.close()


def _play_episode(env: TextEnv, args: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> TurnInfo | None:
    """Returns the last turn of the episode, or None if the player left."""
    count = len(env.examples)
    index = random.Random(args.seed).randrange(count) if args.index is None else args.index
    if index >= count:
        raise UserError(f"index {index} is outside the {count} examples, 0 to {count - 1}")
    hints = ["A line is an action, q quits."]
    if args.auto:
        player, hints = _expert(env), []
    elif isinstance(env, ToolUseEnv):
        player = person = Person(env.toolbox.names)
        hints = [person.help]
    else:
        assert isinstance(env, SessionEnv)
        player = _person_elsewhere(env)
    prompt = loop.run_until_complete(env.areset(index, args.seed or 0))
    print(f"{env.task.name}, example {index} of {count} ({env.examples.source})\n{_RULE}\n{prompt}\n{_RULE}")
    if not args.auto:
        print(f"You have {env.limits.max_turns} turns.", *hints, _RULE, sep="\n")
    observations: list[str] = []
    while (turn := player(observations)) is not None:
        result = loop.run_until_complete(env.astep(turn))
        if result.parsed is not None and result.parsed.error is not None:
            print(f"[invalid turn: {result.format_error}: {result.parsed.detail}]")
        if result.ended:
            return result
        observations.append(result.observation)
        print(result.observation.strip() or "[no reply]")
    return None


if __name__ == "__main__":
    sys.exit(main())

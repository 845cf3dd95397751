"""``sorl-ask "question" --model ..``: the turns of a policy on one question, shown as in the paper's Table 2."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sorl_env.commands.command import run_command, say, whole
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError, install_command
from sorl_env.task import Example
from sorl_env.trajectory import Trajectory

try:
    from sorl_train.evaluate.arguments import (
        add_one_task_options,
        find_source,
        make_env,
        make_parser,
        make_policy,
    )
except ModuleNotFoundError as missing:  # the core alone is installed
    raise SystemExit(f"sorl-ask needs the package {missing.name!r}: {install_command('train')}") from missing

from sorl_train.evaluate.results import Job
from sorl_train.evaluate.runner import Policy, agent_trajectory, in_session

ABOUT = "Ask a policy one question, and show its turns."
_COLOUR = re.compile(r"\033\[\d+m")
_BLUE, _CYAN, _GRAY, _RED, _BOLD, _RESET = (f"\033[{code}m" for code in (34, 36, 90, 31, 1, 0))
_RULE = "-" * 80
_HARMLESS = dict.fromkeys((0x1B, 0x9B), "\N{SYMBOL FOR ESCAPE}")  # no text from outside controls the terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 0 answered, 1 no answer, 2 wrong usage, 130 interrupted."""
    return run_command("sorl-ask", lambda words: _ask(_parser().parse_args(words)), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("sorl-ask", usage="sorl-ask [QUESTION] [OPTION ..]", description=ABOUT)
    parser.add_argument("question", nargs="?", help="in quotes; or give --index")
    parser.add_argument("--index", type=whole(0), help="ask this question of the task's data instead")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="A=TEXT", help="of a multiple-choice question"
    )
    add_one_task_options(parser)
    return parser


def _ask(args: argparse.Namespace) -> int:
    if (args.question is None) == (args.index is None):
        raise UserError(
            'give a question, as sorl-ask "who wrote it?", or --index N for one of the task\'s own'
        )
    source = find_source(args, args.model)
    env = make_env(args, source)
    try:
        example = _example(args, env)
        policy = make_policy(args, source, [env])
        if strange := unknown_words(policy.tokenizer, example.question):
            say(
                "sorl-ask",
                f"this policy's vocabulary lacks {', '.join(strange)}, so it cannot read the whole question; "
                "--index N asks a question of its own task",
            )
        trajectory = ask(policy, env, example, args.seed)
    finally:
        env.close()
    shown = render(env, example, trajectory)
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    print(_COLOUR.sub("", shown) if plain else shown)
    print(_ending(trajectory, example).translate(_HARMLESS))
    return 0 if trajectory.stop_reason.value == "answer" else 1


def ask(policy: Policy, env: ToolUseEnv, example: Example, seed: int = 0) -> Trajectory:
    """Let the policy answer one question, which need not be in the environment's data. Raises ``UserError`` if the
    prompt is too long, or the policy cannot be reached."""
    job = Job(env.task.name, "agent", 0, 0, seed)
    return in_session(policy, lambda: agent_trajectory(policy, env_of_question(env, example), job))


def env_of_question(env: ToolUseEnv, example: Example) -> ToolUseEnv:
    """A copy of ``env`` for one episode of one question, with a reward of nothing."""
    asked = env.spawn()
    asked.examples = dataclasses.replace(env.examples, examples=(example,), source="asked")
    # a reward may read more of an example than a user's question has
    asked.task = dataclasses.replace(env.task, reward=lambda example, turns: {}, turn_reward=None)
    return asked


def unknown_words(tokenizer: Any, question: str) -> list[str]:
    """The words of a question that the tokenizer does not know; a tokenizer of bytes knows all."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    words = dict.fromkeys(re.findall(r"\w+", question))
    return [word for word in words if unknown in tokenizer.encode(word, add_special_tokens=False)]


def render(env: ToolUseEnv, example: Example, trajectory: Trajectory) -> str:
    """The dialogue as in the paper's Table 2, with a note at each malformed turn."""
    dialogue = []
    for turn in trajectory.turns:
        note = f"\n[invalid turn: {turn.format_error}]" if turn.format_error else ""
        dialogue.append((turn.text + note, turn.observation))
    return render_dialogue(example, dialogue, env.toolbox.names)


def render_dialogue(example: Example, dialogue: Iterable[tuple[str, str]], tools: Collection[str]) -> str:
    """The question, the options, then each turn with the environment's reply, with tags in the table's colours.
    ``dialogue`` has pairs of a turn and the observation after it, which is empty after the last one."""
    lines = [_RULE, f"{_BOLD}Question:{_RESET} {example.question.translate(_HARMLESS)}"]
    if example.options:
        lines += ["", f"{_BOLD}Options:{_RESET}"]
        lines += [f"{letter}: {text.translate(_HARMLESS)}" for letter, text in example.options.items()]
    lines.append(_RULE)
    colours = {"think": _BLUE, "information": _GRAY, "answer": _RED, **dict.fromkeys(tools, _CYAN)}
    tag = re.compile(rf"</?({'|'.join(map(re.escape, colours))})>")
    for action, observation in dialogue:
        for text in filter(None, (action.strip(), observation.strip())):
            text = text.translate(_HARMLESS)
            lines += [tag.sub(lambda match: f"{colours[match[1]]}{match[0]}{_RESET}", text), ""]
        lines[-1] = _RULE
    return "\n".join(lines)


def _example(args: argparse.Namespace, env: ToolUseEnv) -> Example:
    if args.index is not None:
        if not 0 <= args.index < len(env.examples):
            raise UserError(
                f"--index {args.index}: {env.examples.source} has questions 0 to {len(env.examples) - 1}"
            )
        return env.examples.examples[args.index]
    options = dict(option.partition("=")[::2] for option in args.options)
    for letter, text in options.items():
        if not re.fullmatch("[A-J]", letter) or not text:
            raise UserError(f"--options {letter}={text}: write A=TEXT B=TEXT, letters from A to J")
    return Example(id="asked", question=args.question, options=options or None)


def _ending(trajectory: Trajectory, example: Example) -> str:
    last = trajectory.turns[-1] if trajectory.turns else None
    if last is None or last.kind != "answer":
        return f"No answer: {trajectory.error or trajectory.stop_reason.value}"
    right = f"  (right: {' | '.join(example.golden_answers)})" if example.golden_answers else ""
    return f"Answer: {last.content}{right}"


if __name__ == "__main__":
    sys.exit(main())

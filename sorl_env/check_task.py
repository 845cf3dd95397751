"""``sorl-check-task NAME``: check on real rows that a task keeps its contract."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from sorl_env.check import Check, describe_checks, raised
from sorl_env.check_episodes import check_episodes, requests
from sorl_env.check_session import check_session
from sorl_env.check_tools import check_tool
from sorl_env.command import (
    FAILED,
    Parser,
    add_json_option,
    number,
    print_json,
    run_command,
    whole,
)
from sorl_env.env import ToolUseEnv
from sorl_env.env_parts import add_task_options, read_task_args
from sorl_env.errors import UserError
from sorl_env.registry import load_task
from sorl_env.rewards import normalize_answer
from sorl_env.session_env import SessionEnv
from sorl_env.step import StepResult
from sorl_env.task import Example, Task, ToolSettings
from sorl_env.text import quoted
from sorl_env.text_env import need_tools, open_env
from sorl_env.tokens import Tokenizer, encode_prompt
from sorl_env.tool import RESERVED_NAMES

__all__ = ["WRONG_ANSWER", "Check", "check_task", "main"]

WRONG_ANSWER = "surely not the answer"
_SEEDS = (0, 1, 2)
_TAG = re.compile(r"</?([A-Za-z_][A-Za-z0-9_-]*)>")


def check_task(env: ToolUseEnv, *, limit: int = 200, tokenizer: Tokenizer | None = None) -> list[Check]:
    """Check an environment's task on its first ``limit`` examples.

    Args:
        tokenizer: counts the tokens of the prompts. Without one, words are counted, which are never more than tokens.
    """
    task = env.task
    examples = env.examples.examples[:limit]
    checks = [
        _check_rows(task, len(env.examples)),
        *_check_reward(env, len(examples)),
        *_check_prompts(env, examples, tokenizer),
        *(check_tool(env, tool, examples[0].question) for tool in env.toolbox.tools),
    ]
    if any(check.tool_is_out for check in checks):
        return checks  # every episode that uses the tool would wait for it again
    checks.append(_contained("seeds", lambda: _check_seeds(env)))
    if env.toolbox.tools:
        checks.append(check_episodes(env))
    if (expert := task.expert) is not None:
        checks.append(_check_expert(env.spawn(), expert, len(examples)))
    return checks


def _contained(name: str, check: Callable[[], Check]) -> Check:
    """A check in which the task's own code may raise, which must not hide the other checks."""
    try:
        return check()
    except UserError:
        raise  # says which contract is broken, and would do so in every check
    except Exception as error:  # noqa: BLE001  as the rollout contains it
        return Check(name, False, raised(error))


def _check_rows(task: Task, count: int) -> Check:
    """All rows were read when the examples were loaded; this checks that a row which cannot be read is refused."""
    try:
        task.parse_row({})
    except (KeyError, ValueError) as error:
        return Check("rows", True, f"{count} read; an empty row is refused: {type(error).__name__}: {error}")
    except (TypeError, AttributeError, IndexError) as error:
        return Check(
            "rows",
            False,
            f"parse_row({{}}) raises {error!r}, not a KeyError or ValueError that names the column",
        )
    return Check("rows", False, "parse_row({}) succeeds: raise KeyError or ValueError naming the column")


def _check_reward(env: ToolUseEnv, count: int) -> list[Check]:
    """As the only turn of an episode, a gold answer must score 1 and an empty or a wrong answer 0."""
    task = env.task
    once = env.spawn()
    once.limits = replace(env.limits, max_turns=1)
    wrong = task.wrong_answer or (lambda example: WRONG_ANSWER)
    cases: dict[str, tuple[float, Callable[[Example], Sequence[str]]]] = {
        "gold answer": (1.0, lambda example: example.golden_answers),
        "empty answer": (0.0, lambda example: _nothing(example.golden_answers)),
        "wrong answer": (0.0, lambda example: (wrong(example),)),
    }
    if not any(example.golden_answers for example in env.examples.examples[:count]):
        del cases["gold answer"]  # nothing to compare with, so the expert has to show that 1.0 can be reached
    checks = [
        _contained(name, functools.partial(_score_answers, once, name, count, *case))
        for name, case in cases.items()
    ]
    if "gold answer" not in cases and task.expert is None:
        checks.append(Check("gold answer", False, "there are no golden_answers and no expert"))
    return checks


def _nothing(golds: Sequence[str]) -> Sequence[str]:
    """Answers that say nothing. A gold answer such as ``A`` or ``!!``, of which normalization leaves nothing, must not
    make them right."""
    if all(normalize_answer(gold) for gold in golds):
        return ("",)
    return ("", *(text for text in ("...", "the") if text not in golds))


def _score_answers(
    env: ToolUseEnv, name: str, count: int, expected: float, answers: Callable[[Example], Sequence[str]]
) -> Check:
    scored = 0
    for index in range(count):
        env.reset(options={"index": index})
        given = answers(env.example)
        if not given:
            return Check(name, False, f"example {quoted(env.example.id)} has no golden_answers")
        for answer in given:
            env.reset(options={"index": index})
            result = env.step(f"<think>check</think>\n<answer>{answer}</answer>")
            if abs(result.reward - expected) > 1e-6:
                return Check(
                    name,
                    False,
                    f"example {quoted(env.example.id)}: {quoted(answer)} scores {result.reward:g} "
                    f"{result.info['reward_items']}, expected {expected:g}",
                )
            scored += 1
    return Check(name, True, f"{scored} score {expected:g}")


def _check_prompts(env: ToolUseEnv, examples: Sequence[Example], tokenizer: Tokenizer | None) -> list[Check]:
    task = env.task
    sizes: list[tuple[int, str]] = []
    prompts = [env.format.prompt(task, example) for example in examples]
    for example, prompt in zip(examples, prompts, strict=True):
        if tokenizer is None:
            sizes.append((len(f"{task.system_prompt or ''} {prompt}".split()), example.id))
        else:
            sizes.append((len(encode_prompt(tokenizer, prompt, task.system_prompt)), example.id))
    longest, example_id = max(sizes)
    unit = "words; count tokens with --tokenizer FOLDER" if tokenizer is None else "tokens"
    limit = task.limits.max_prompt_tokens
    detail = f"longest {longest}, example {quoted(example_id)} (limit {limit}; {unit})"
    problem = _find_tag_problem(task, env.toolbox.names, prompts)
    return [Check("prompts", longest <= limit, detail), *([Check("tags", False, problem)] if problem else [])]


def _find_tag_problem(task: Task, tools: Sequence[str], prompts: Sequence[str]) -> str | None:
    """What is wrong with the tags that all prompts name; others come with the data."""
    named = set.intersection(*(set(_TAG.findall(f"{task.system_prompt or ''} {one}")) for one in prompts))
    if unknown := sorted(named - {*tools, "answer", *RESERVED_NAMES}):
        have = ", ".join(f"<{tool}>" for tool in (*tools, "answer"))
        return f"the prompt names <{unknown[0]}>, which no tool reads; the tags are {have}"
    if task.expert is not None:
        return None  # its demonstrations may teach the tags
    for tag in (*tools, "answer"):
        if tag not in named:
            return (
                f"the prompt does not name <{tag}>, so no policy can know of it: say what to write between <{tag}> and "
                f"</{tag}>"
            )
    return None


def _check_seeds(env: ToolUseEnv) -> Check:
    """The same seed and the same turns must give the same observations and rewards."""
    turns = [
        f"<{tool.name}>{next(requests(tool, env.example.question)).argument}</{tool.name}>"
        for tool in env.toolbox.tools
    ]
    turns.append(f"<answer>{WRONG_ANSWER}</answer>")
    for seed in _SEEDS:
        first, second = (_episode(env.spawn(), seed, turns) for _ in range(2))
        if first != second:
            turn = next(i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
            where = f"turn {turn}" if turn else "reset"
            seen = f"{first[turn][0][:60]!r}, and then {second[turn][0][:60]!r}"
            return Check("seeds", False, f"seed {seed}, {where}: first {seen}")
    return Check("seeds", True, f"{', '.join(map(str, _SEEDS))} reproduce their episodes")


def _episode(env: ToolUseEnv, seed: int, turns: Sequence[str]) -> list[tuple[str, float, str]]:
    prompt, info = env.reset(seed=seed)
    seen = [(prompt, 0.0, info["example_id"])]
    for turn in turns:
        result = env.step(f"<think>check</think>\n{turn}")
        seen.append((result.observation, result.reward, str(result.info["stop_reason"])))
        if result.terminated or result.truncated:
            break
    return seen


def _check_expert(
    env: ToolUseEnv, expert: Callable[[Example, Sequence[str]], str | None], count: int
) -> Check:
    """An expert that plays must solve something; it may give up where the tools do not return what it needs."""
    solved = given_up = 0
    failed = ""  # the first episode that it did not solve
    for index in range(count):
        env.reset(options={"index": index})
        observations: list[str] = []
        while True:
            try:
                turn = expert(env.example, observations)
            except Exception as error:  # noqa: BLE001  as in _contained
                saw = f", after it saw {quoted(observations[-1].strip(), 300)}" if observations else ""
                where = f"example {quoted(env.example.id)}, turn {len(observations)}"
                return Check("expert", False, f"{where}: {raised(error)}{saw}")
            if turn is None:
                given_up += 1
                break
            result = env.step(turn)
            observations.append(result.observation)
            if result.terminated or result.truncated:
                right = abs(result.reward - 1.0) <= 1e-6
                solved += right
                if not right and not failed:
                    failed = f"; the first that it does not: {_told(env, turn, result)}"
                break
    left_out = f", gives up on {given_up}" if given_up else ""
    # without gold answers nothing else shows that a reward of 1 can be reached
    may_give_up = given_up == count and any(one.golden_answers for one in env.examples.examples[:count])
    said = f"solves {solved} of {count}{left_out}"
    return Check("expert", solved > 0 or may_give_up, said if solved else said + failed)


def _told(env: ToolUseEnv, turn: str, result: StepResult) -> str:
    """How an episode ended, and its last turn."""
    why = result.info["error"] or result.info["format_error"] or result.info["stop_reason"]
    return f"example {quoted(env.example.id)} ends with {why}, reward {result.reward:g}, turn {quoted(turn, 120)}"


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer in a model folder.

    Raises:
        UserError: transformers is not installed, or the folder holds no tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise UserError("--tokenizer needs transformers: pip install 'sorl[train]'") from error
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, (OSError, ValueError)):
            raise  # the tokenizers library raises a plain Exception for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder}: no tokenizer there ({reason}); give a model folder") from error
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 if the contract holds, 1 if not."""
    return run_command("sorl-check-task", _check, argv, refused=FAILED)


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    about = "Check a task against its contract."
    parser = Parser(prog="sorl-check-task", description=about, mappings=("task_args",))
    add_task_options(parser)
    parser.add_argument("--limit", type=whole(1), default=200, help="examples to check (default 200)")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="count prompts in tokens, with the tokenizer of this model folder",
    )
    parser.add_argument(
        "--search.timeout_s",
        dest="timeout_s",
        type=number(above=0, high=3600),
        default=10.0,
        metavar="SECONDS",
        help="for a tool to answer, retries included (default: 10)",
    )
    add_json_option(parser)
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def _check(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    settings = ToolSettings(
        corpus=args.corpus,
        search_url=args.search_url,
        timeout_s=args.timeout_s,
        tools=tuple(args.tools),
    )
    task = load_task(args.task, **read_task_args(args))
    env = open_env(task, data=args.data, split=args.split, tool_settings=settings)
    loaded = env.examples
    if not args.json:
        sample = ", a sample and not the benchmark" if loaded.is_sample else ""
        print(f"task {env.task.name}: {len(loaded)} examples, split {loaded.split}, {loaded.source}{sample}")
    try:
        if isinstance(env, SessionEnv):
            checks = check_session(env, limit=args.limit, tokenizer=tokenizer)
        else:
            checks = check_task(need_tools(env, "the contract"), limit=args.limit, tokenizer=tokenizer)
    finally:
        env.close()
    if args.json:
        facts = {
            "task": env.task.name,
            "examples": len(loaded),
            "split": loaded.split,
            "source": loaded.source,
        }
        print_json({**facts, "is_sample": loaded.is_sample, "checks": checks})
    else:
        print(describe_checks(checks, 14))
    return int(not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(main())

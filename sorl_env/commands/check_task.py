"""``sorl-check-task NAME``: check on real rows that a task keeps its contract."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from sorl_env.bridges.session_env import ACTION, SessionEnv
from sorl_env.commands.check import Check, check_episodes, check_tool, describe_checks, raised, requests
from sorl_env.commands.command import (
    FAILED,
    Parser,
    add_json_option,
    number,
    print_json,
    run_async,
    run_command,
    whole,
)
from sorl_env.commands.task_options import add_task_options, open_named_task
from sorl_env.envs.text_env import TextEnv, require_tool_env
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError, install_command
from sorl_env.rewards import normalize_answer
from sorl_env.task.task import Example, Task
from sorl_env.text import quoted
from sorl_env.tool.tool import RESERVED_NAMES, ToolUnavailableError
from sorl_env.turns.tokens import TINY_DIALOGUES, WORD_OR_MARK, Tokenizer, encode_prompt

WRONG_ANSWER = "surely not the answer"
_CLOSE = 1e-6  # between a reward and what it should be
_SEEDS = (0, 1, 2)
Expert = Callable[[Example, Sequence[str]], str | None]
_TAG = re.compile(r"</?([A-Za-z_][A-Za-z0-9_-]*)>")


def check_task(env: ToolUseEnv, *, limit: int = 200, tokenizer: Tokenizer | None = None) -> list[Check]:
    """Check an environment's task on its first ``limit`` examples.

    Args:
        tokenizer: counts the tokens of the prompts. Without one, words are counted, which are never more than tokens.
    """
    examples = env.examples.examples[:limit]
    prompts = [env.prompt(example) for example in examples]
    checks = [
        _check_rows(env.task, len(env.examples)),
        *_check_rewards(env, examples),
        _check_sizes(env, prompts, tokenizer),
        *_check_tags(env, prompts),
        *(check_tool(env, tool, examples[0].question) for tool in env.toolbox.tools),
    ]
    if any(check.tool_is_out for check in checks):
        return checks  # every episode that uses the tool would wait for it again
    checks.append(_contained("seeds", lambda: _check_seeds(env)))
    if env.toolbox.tools:
        checks.append(check_episodes(env))
    if env.task.expert is not None:
        checks.append(_check_expert(env.spawn(), env.task.expert, examples))
        if checks[-1].passed and env.task.vocabulary is not None:
            checks.append(_check_words(env.spawn(), env.task.expert, examples, checks[-1].detail))
    return checks


async def check_session(
    env: SessionEnv, *, limit: int = 200, tokenizer: Tokenizer | None = None
) -> list[Check]:
    """Check an environment from elsewhere: does it answer, and does its seed decide how an episode begins?

    The texts that begin its first ``limit`` episodes are read; one of them plays a turn.
    """
    prompts: list[str] = []
    try:
        for index in range(min(limit, len(env.examples))):
            prompts.append(await env.areset(index, _SEEDS[0]))
            env.end_episode()
        again = await env.areset(0, _SEEDS[0])
        turn = await env.astep(f"<{ACTION}>look</{ACTION}>" if env.format == "action" else "look")
    except ToolUnavailableError as error:
        return [Check("episodes", False, str(error))]
    finally:
        env.end_episode()
    problem = turn.error
    seeds = "the first episode begins in the same way again"
    if again != prompts[0]:
        seeds = "the first episode began in two ways, but a group needs one prompt: let it follow its seed"
    return [
        Check("episodes", True, f"{len(prompts)} begin"),
        _check_sizes(env, prompts, tokenizer),
        Check("seeds", again == prompts[0], seeds),
        Check("turn", problem is None, problem or f"a reply of {len(turn.observation)} characters"),
    ]


def _contained(name: str, check: Callable[[], Check]) -> Check:
    """A check in which the task's own code may raise, which must not hide the other checks."""
    try:
        return check()
    except UserError:
        raise  # would be raised in every check
    except Exception as error:  # noqa: BLE001  as the rollout contains it
        return Check(name, False, raised(error))


def _check_rows(task: Task, count: int) -> Check:
    """All rows were read when the examples were loaded; this checks that a row which cannot be read is refused."""
    try:
        task.parse_row({})
    except (KeyError, ValueError) as error:
        return Check("rows", True, f"{count} read; an empty row is refused: {type(error).__name__}: {error}")
    except (TypeError, AttributeError, IndexError) as error:
        wrong = f"raises {error!r}"
    else:
        wrong = "succeeds"
    return Check("rows", False, f"parse_row({{}}) {wrong}: raise KeyError or ValueError naming the column")


def _check_rewards(env: ToolUseEnv, examples: Sequence[Example]) -> Iterator[Check]:
    """As the only turn of an episode, a gold answer must score 1 and an empty or a wrong answer 0."""
    wrong = env.task.wrong_answer or (lambda example: WRONG_ANSWER)
    cases: dict[str, tuple[float, Callable[[Example], Sequence[str]]]] = {
        "gold answer": (1.0, lambda example: example.golden_answers),
        "empty answer": (0.0, lambda example: _nothing(example.golden_answers)),
        "wrong answer": (0.0, lambda example: (wrong(example),)),
    }
    if not any(example.golden_answers for example in examples):
        del cases["gold answer"]  # nothing to compare with, so the expert has to show that 1.0 can be reached
        if env.task.expert is None:
            yield Check("gold answer", False, "there are no golden_answers and no expert")
    once = env.spawn()
    once.limits = replace(env.limits, max_turns=1)
    for name, case in cases.items():
        yield _contained(name, partial(_score_answers, once, len(examples), name, *case))


def _nothing(golds: Sequence[str]) -> Sequence[str]:
    """Answers without content. They must score 0 also where a gold answer, such as ``A``, normalizes to nothing."""
    if all(normalize_answer(gold) for gold in golds):
        return ("",)
    return ("", *(text for text in ("...", "the") if text not in golds))


def _score_answers(
    env: ToolUseEnv, count: int, name: str, expected: float, answers: Callable[[Example], Sequence[str]]
) -> Check:
    scored = 0
    for index in range(count):
        env.reset(options={"index": index})
        where, given = f"example {quoted(env.example.id)}", answers(env.example)
        if not given:
            return Check(name, False, f"{where} has no golden_answers")
        for answer in given:
            env.reset(options={"index": index})
            result = env.play_turn(f"<think>check</think>\n<answer>{answer}</answer>")
            if abs(result.reward - expected) > _CLOSE:
                got = f"{quoted(answer)} scores {result.reward:g} {result.reward_items}"
                return Check(name, False, f"{where}: {got}, expected {expected:g}")
            scored += 1
    return Check(name, True, f"{scored} score {expected:g}")


def _check_sizes(env: TextEnv, prompts: Sequence[str], tokenizer: Tokenizer | None) -> Check:
    system, limit = env.task.system_prompt, env.limits.max_prompt_tokens
    if tokenizer is None:
        sizes = [len(f"{system or ''} {prompt}".split()) for prompt in prompts]
    else:
        sizes = [len(encode_prompt(tokenizer, prompt, system)) for prompt in prompts]
    unit = "words; count tokens with --tokenizer FOLDER" if tokenizer is None else "tokens"
    longest = max(sizes)
    example = env.examples.examples[sizes.index(longest)]
    detail = f"longest {longest}, example {quoted(example.id)} (limit {limit}; {unit})"
    return Check("prompts", longest <= limit, detail)


def _check_tags(env: ToolUseEnv, prompts: Sequence[str]) -> Iterator[Check]:
    """What is wrong with the tags that all prompts name; others come with the data."""
    task, tags = env.task, (*env.toolbox.names, "answer")
    named = set.intersection(*(set(_TAG.findall(f"{task.system_prompt or ''} {one}")) for one in prompts))
    have = f"the tags are {', '.join(f'<{tag}>' for tag in tags)}"
    if unknown := sorted(named - {*tags, *RESERVED_NAMES}):
        yield Check("tags", False, f"the prompt names <{unknown[0]}>, which no tool reads; {have}")
    elif task.expert is None and (missing := [tag for tag in tags if tag not in named]):
        # the demonstrations of an expert may teach the tags
        said = f"the prompt does not name <{missing[0]}>, so no policy can know of it; {have}"
        yield Check("tags", False, said)


def _check_seeds(env: ToolUseEnv) -> Check:
    """The same seed and the same turns must give the same observations and rewards."""
    turns = [
        f"<{tool.name}>{next(requests(tool, env.example.question)).argument}</{tool.name}>"
        for tool in env.toolbox.tools
    ]
    turns.append(f"<answer>{WRONG_ANSWER}</answer>")
    for seed in _SEEDS:
        first, second = (_episode(env.spawn(), seed, turns) for _ in range(2))
        for turn, (one, other) in enumerate(zip(first, second, strict=False)):
            if one != other:
                where = f"turn {turn}" if turn else "reset"
                seen = f"first {one[0][:60]!r}, and then {other[0][:60]!r}"
                return Check("seeds", False, f"seed {seed}, {where}: {seen}")
    return Check("seeds", True, f"{', '.join(map(str, _SEEDS))} reproduce their episodes")


def _episode(env: ToolUseEnv, seed: int, turns: Sequence[str]) -> list[tuple[str, float, str]]:
    prompt, info = env.reset(seed=seed)
    seen = [(prompt, 0.0, info["example_id"])]
    for turn in turns:
        result = env.play_turn(f"<think>check</think>\n{turn}")
        seen.append((result.observation, result.reward, str(result.stop_reason)))
        if result.ended:
            break
    return seen


def _check_words(env: ToolUseEnv, expert: Expert, examples: Sequence[Example], alone: str) -> Check:
    """A policy of ``model=tiny`` writes the expert's turns with blanks around all words and marks; they must do what
    they do ``alone``, without the blanks."""
    texts: list[str] = []  # of all dialogues
    first = 0  # of them, those whose words the policy's vocabulary takes up

    def listen(example: Example, observations: Sequence[str]) -> str | None:
        nonlocal first
        turn = expert(example, observations)
        texts.extend([*(observations[-1:] or [env.prompt(example)]), turn or ""])
        if example in examples[:TINY_DIALOGUES]:
            first = len(texts)
        return turn

    played = _check_expert(env, listen, examples, lambda turn: " ".join(re.findall(WORD_OR_MARK, turn)))
    if played.detail == alone:
        assert env.task.vocabulary is not None
        known = set(re.findall(WORD_OR_MARK, " ".join([*env.task.vocabulary(), *texts[:first]])))
        if unknown := sorted(set(re.findall(WORD_OR_MARK, " ".join(texts[first:]))) - known):
            more = f" and {len(unknown) - 5} more words" if len(unknown) > 5 else ""
            said = f"the vocabulary lacks {', '.join(map(quoted, unknown[:5]))}{more} of these dialogues"
            return Check("tiny", False, f"{said}; a tiny policy reads and writes only its words")
        return Check("tiny", True, "the expert solves as many with blanks around its words and marks")
    advice = "let tools, reward and expert take such texts, or leave out the vocabulary if no tiny policy is trained"
    said = f"model=tiny writes blanks around words and marks; with them: {played.detail}; {advice}"
    return Check("tiny", False, said)


def _check_expert(
    env: ToolUseEnv, expert: Expert, examples: Sequence[Example], write: Callable[[str], str] = str
) -> Check:
    """An expert that plays must solve something; it may give up where the tools do not return what it needs. Its turns
    are played as ``write`` writes them."""
    solved = given_up = 0
    failed = ""  # the first episode that it did not solve
    for index, example in enumerate(examples):
        env.reset(options={"index": index})
        where, observations = f"example {quoted(example.id)}", list[str]()
        try:
            while (turn := expert(env.example, observations)) is not None:
                turn = write(turn)
                result = env.play_turn(turn)
                observations.append(result.observation)
                if result.ended:
                    break
        except Exception as error:  # noqa: BLE001  as in _contained
            saw = f", after it saw {quoted(observations[-1].strip(), 300)}" if observations else ""
            return Check("expert", False, f"{where}, turn {len(observations)}: {raised(error)}{saw}")
        if turn is None:
            given_up += 1
        elif abs(result.reward - 1) <= _CLOSE:
            solved += 1
        elif not failed:
            assert result.stop_reason is not None
            why = result.error or result.format_error or result.stop_reason.value
            told = f"{where} ends with {why}, reward {result.reward:g}, turn {quoted(turn, 120)}"
            failed = f"; the first that it does not: {told}"
    said = f"solves {solved} of {len(examples)}" + (f", gives up on {given_up}" if given_up else "")
    if given_up == len(examples):
        said += ": the tools do not return what it needs, so it can demonstrate nothing"
    # without gold answers nothing else shows that a reward of 1 can be reached
    may_give_up = given_up == len(examples) and any(one.golden_answers for one in examples)
    return Check("expert", solved > 0 or may_give_up, said if solved else said + failed)


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer in a model folder.

    Raises:
        UserError: transformers is not installed, or the folder holds no tokenizer.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ModuleNotFoundError as error:
        raise UserError(f"--tokenizer needs transformers: {install_command('train')}") from error
    except Exception as error:  # the tokenizers library raises a plain Exception for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder}: no tokenizer there ({reason}); give a model folder") from error
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 if the contract holds, 1 if not."""
    return run_command("sorl-check-task", _check, argv, refused=FAILED)


def _check(argv: Sequence[str]) -> int:
    about = "Check a task against its contract."
    parser = Parser(prog="sorl-check-task", description=about, mappings=("task_args",))
    add_task_options(parser)
    add = parser.add_argument
    add("--limit", type=whole(1), default=200, help="examples to check (default 200)")
    counted = "count prompts in tokens, with the tokenizer of this model folder"
    add("--tokenizer", metavar="FOLDER", help=counted)
    seconds, waits = number(above=0, high=3600), "for a tool to answer, retries included (default: 10)"
    add("--search.timeout_s", dest="timeout_s", type=seconds, default=10.0, metavar="SECONDS", help=waits)
    add_json_option(parser)
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    (env,) = open_named_task(args, args.split, timeout_s=args.timeout_s)
    task, given = env.task, env.examples
    if not args.json:
        sample = ", a sample and not the benchmark" if given.is_sample else ""
        print(f"task {task.name}: {len(given)} examples, split {given.split}, {given.source}{sample}")
    try:
        if isinstance(env, SessionEnv):
            checks = run_async(check_session(env, limit=args.limit, tokenizer=tokenizer))
        else:
            checks = check_task(require_tool_env(env, "the contract"), limit=args.limit, tokenizer=tokenizer)
    finally:
        env.close()
    if args.json:
        facts = {"task": task.name, "examples": len(given), "split": given.split, "source": given.source}
        print_json({**facts, "is_sample": given.is_sample, "checks": checks})
    else:
        print(describe_checks(checks, 14))
    return int(not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(main())

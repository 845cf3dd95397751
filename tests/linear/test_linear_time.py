"""What reads a policy's text or retrieved text does so in linear time. Nothing is timed: steps are counted.

A new pattern, or a new use of difflib, has to be listed here: `OUTSIDE` if it meets such text, `INSIDE` if it does not.
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sorl_env import parser
from sorl_train.models import tiny

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"sorl_env": "sorl_env", "sorl_train": "sorl_train", "tasks": "sorl_tasks", "tools": "sorl_tools"}
STEPS = runpy.run_path(str(Path(__file__).parent / "regex_steps.py"))
READERS = runpy.run_path(str(Path(__file__).parent / "readers.py"))
SHORT, LONG = 200, 800  # characters; four times as many may take four times as many steps
FACTOR = 7.0  # quadratic time would be 16

# Patterns that meet text of a policy, of a tool or of a server. A text stands for the pattern itself where it is not a
# constant of its module; more attacks, as (beginning, repeated, end), where those made from the pattern may not do.
OUTSIDE: dict[str, Any] = {
    "sorl_env/errors.py:did_you_mean": None,  # difflib: a policy may call a tool by any name. See readers.py
    "sorl_env/option_text.py:_WORD": re.Pattern,
    "sorl_env/option_text.py:_THOUSANDS": re.Pattern,
    "sorl_env/parser.py:_patterns": (
        # the parser asks for a full match alone
        re.compile(rf"\A(?:{parser._patterns(('search', 'calculate')).valid.pattern})\Z"),
        parser._patterns(("search", "calculate")).tag,
    ),
    "sorl_env/parser.py:_MARKUP": re.Pattern,
    "sorl_env/render.py:render_dialogue": (re.compile("</?(think|information|answer|search)>"),),
    "sorl_env/rewards.py:_PUNCTUATION": re.Pattern,
    "sorl_env/rewards.py:_ARTICLES": re.Pattern,
    "sorl_env/rewards.py:_CHOICE": re.Pattern,
    "sorl_env/text.py:_SURROGATE_ESCAPE": re.Pattern,
    "sorl_env/tool_call_parser.py:_FUNCTION": re.Pattern,
    "sorl_env/tool_call_parser.py:_PARAMETER": re.Pattern,
    "sorl_env/tool_call_parser.py:_GEMMA_KEY": re.Pattern,
    "sorl_env/tool_call_parser.py:_CALL_ID": re.Pattern,
    "sorl_env/tool_call_parser.py:_LLAMA_CALL": re.Pattern,
    "sorl_env/turn_format.py:_CONTROL": re.Pattern,
    "sorl_train/openrlhf/launch.py:_EXCEPTION": re.Pattern,
    "sorl_train/evaluate/answers.py:_PHRASE": re.Pattern,
    "sorl_train/evaluate/answers.py:_SENTENCE_END": re.Pattern,
    "sorl_train/evaluate/answers.py:_REASON": re.Pattern,
    "sorl_train/evaluate/ask.py:_COLOUR": re.Pattern,
    "sorl_train/evaluate/endpoint.py:_PIECE": (re.compile(r" ?\w{1,4}|\s|[^\w\s]"),),
    "sorl_train/report/dialogues.py:_TAG": re.Pattern,
    "sorl_train/report/dialogues.py:_QUESTION": re.Pattern,
    "sorl_train/models/tiny.py:word_tokenizer": (re.compile(tiny.TOKEN), re.compile(tiny.CALL_TOKEN)),
    "sorl_env/token_classes.py:_TAG": re.Pattern,
    "tasks/minihop.py:_PASSAGE": re.Pattern,
    "tasks/minihop.py:_read_fact": (re.compile(r"\bcapital (\w+ \w+)"),),
    "tools/index/words.py:PATTERN": re.Pattern,
}
# Patterns that meet names, settings, command lines and rows of data sets alone: what they read is the user's own.
INSIDE = frozenset(
    """
    sorl_env/check_task.py:_TAG sorl_env/tool.py:_NAME sorl_train/run/checkpoint.py:_NAME sorl_train/run/lock.py:_in_use
    tools/mcp/schema.py:_NOT_IN_A_TAG
    sorl_train/cli.py:_default_run_dir sorl_env/command.py:error sorl_env/command.py:read sorl_env/command.py:shortened
    sorl_train/config/run_settings.py:_DEVICE
    sorl_env/command.py:_underscored sorl_train/algorithms.py:check_choice sorl_train/config/files.py:-
    sorl_train/config/schema.py:suggest_key sorl_train/evaluate/arguments.py:_by_task
    sorl_train/evaluate/ask.py:unknown_words sorl_train/evaluate/ask.py:_example
    sorl_train/evaluate/find_policy.py:_HUB_NAME
    sorl_train/run/metrics_log.py:_start_wandb sorl_train/prepare/overlap.py:_WORD
    sorl_train/run/folder.py:_TEMPORARY sorl_train/run/atomic_folder.py:atomic_folder
    sorl_train/report/dialogues.py:_STEP_FILE sorl_train/report/groups.py:_RUN_ID
    sorl_train/report/groups.py:_MOVED_ASIDE sorl_train/report/groups.py:_natural
    sorl_train/serve_agent/chat.py:_options
    sorl_train/report/viewer.py:_STEPS
    tasks/alphamed19k.py:_LABEL tasks/alphamed19k.py:_LETTER tasks/medxpertqa.py:_CHOICES
    tools/index/encoder.py:_E5 tools/index/build/estimate.py:vector_bytes tools/index/faiss_kinds.py:factory_string
    """.split()
)
SEVERAL = {  # places with more than one call
    "sorl_env/parser.py:_patterns": 2,
    "sorl_train/config/schema.py:suggest_key": 3,
    "sorl_train/models/tiny.py:word_tokenizer": 2,
    "tools/index/build/estimate.py:vector_bytes": 2,
}


def sites() -> Iterator[str]:
    """Where the source compiles or uses a pattern, or compares texts with difflib: file, and name or function."""
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from (f"{path.relative_to(ROOT).as_posix()}:{name or '-'}" for name in _calls(tree, ""))


def _calls(node: ast.AST, where: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        name = where
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = child.name
        elif not where and isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            name = child.targets[0].id
        if isinstance(child, ast.Call) and ast.unparse(child.func) != "re.escape":
            called = ast.unparse(child.func).split(".")
            if called[0] in ("re", "difflib", "Regex", "SequenceMatcher", "get_close_matches"):
                yield name
        yield from _calls(child, name)


def patterns_of(site: str) -> tuple[re.Pattern[str], ...]:
    listed = OUTSIDE[site]
    if listed is not re.Pattern:
        return listed or ()
    path, name = site.split(".py:")
    folder, _, rest = path.partition("/")
    module = importlib.import_module(f"{PACKAGES[folder]}.{rest.replace('/', '.')}")
    return (getattr(module, name),)


def growth(pattern: re.Pattern[str], parts: tuple[str, str, str]) -> float:
    """How many times as many steps a text takes that is four times as long; infinite where they are too many."""
    counter = STEPS["StepCounter"](pattern)
    steps = []
    try:
        for length in (SHORT, LONG):
            counter.spans(READERS["text_of"](parts, length))
            steps.append(counter.steps)
    except STEPS["TooManySteps"]:
        return float("inf")
    return steps[1] / steps[0]


@pytest.fixture(autouse=True)
def _deep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The counting matcher calls itself for every character."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(60_000)
    yield
    sys.setrecursionlimit(before)


def test_every_pattern_is_listed() -> None:
    found = Counter(sites())
    assert set(OUTSIDE).isdisjoint(INSIDE)
    listed = {site: SEVERAL.get(site, 1) for site in {*OUTSIDE, *INSIDE}}
    assert dict(found) == listed, (
        "list a new pattern in OUTSIDE (it meets a policy's text, a reply) or in INSIDE"
    )


@pytest.mark.parametrize("site", [site for site in OUTSIDE if OUTSIDE[site] is not None])
def test_a_pattern_takes_steps_in_proportion_to_the_text(site: str) -> None:
    _check(site, mixtures=0, every=12)


@pytest.mark.slow
@pytest.mark.parametrize("site", [site for site in OUTSIDE if OUTSIDE[site] is not None])
def test_a_pattern_takes_steps_in_proportion_to_any_text(site: str) -> None:
    _check(site, mixtures=12, every=1)


def _check(site: str, mixtures: int, every: int) -> None:
    for pattern in patterns_of(site):
        texts = [*STEPS["attacks"](pattern, mixtures)][::every] + [*READERS["TEXTS"]][:: 2 * every]
        worst = max(texts, key=lambda parts: growth(pattern, parts))
        assert growth(pattern, worst) < FACTOR, (site, worst)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        r"<answer>(.*?)</answer>(?s:)",
        r"<(?P<tag>[A-Za-z_][\w-]*)>[^\0]*?</(?P=tag)>",
        r"^\s*Question:\s*(\S.*)$(?m:)",
        r"\s+x",
        r"(?:a|aa)+b",
        r"(?:\b(?:answer|option)\b\s*(?:is|=)+\s*:?\s*|\b(?:choose)\s+)+[A-J]\b",
        r"\banswer(?:\s+is\s*:?|\s*:)\s*([^\n]+)",
    ],
)
def test_the_counter_sees_what_is_not_linear(pattern: str) -> None:
    """Patterns that this project had, and textbook ones."""
    flags = re.MULTILINE if pattern.endswith("(?m:)") else re.DOTALL
    compiled = re.compile(pattern.removesuffix("(?m:)").removesuffix("(?s:)"), flags)
    texts = [*READERS["TEXTS"], *STEPS["attacks"](compiled, 40)]
    assert any(growth(compiled, parts) > FACTOR for parts in texts)


@pytest.mark.slow
@pytest.mark.parametrize("site", [site for site in OUTSIDE if OUTSIDE[site] is not None][::3])
def test_the_counter_finds_what_re_finds(site: str) -> None:
    for pattern in patterns_of(site):
        for parts in [*STEPS["attacks"](pattern, 20)][::4]:
            text = READERS["text_of"](parts, 60)
            assert STEPS["StepCounter"](pattern).spans(text) == [m.span() for m in pattern.finditer(text)]


def lines_run(reader: str, text: str) -> int:
    """How many lines of Python a reader runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        READERS["READERS"][reader](text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("reader", READERS["READERS"])
def test_a_reader_runs_lines_in_proportion_to_the_text(reader: str) -> None:
    for parts in READERS["TEXTS"][::4]:
        short, long = (lines_run(reader, READERS["text_of"](parts, length)) for length in (SHORT, LONG))
        assert long < FACTOR * short + 50, parts


@pytest.mark.slow
def test_every_reader_reads_a_hundred_thousand_characters() -> None:
    """The limit is a hundred times what they take; a quadratic one would need hours."""
    command = [sys.executable, str(Path(__file__).parent / "readers.py"), "100000", "1"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert made.returncode == 0 and made.stdout.endswith("all read\n"), (
        made.stdout[-300:],
        made.stderr[-600:],
    )

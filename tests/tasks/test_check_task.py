"""sorl-check-task: what it finds, and what it says."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from sorl_env import Example, Limits, Task, ToolSettings, ToolUnavailableError, ToolUseEnv
from sorl_env.commands.check import requests
from sorl_env.commands.check_task import check_task, main
from sorl_env.rewards import answer_match, exact_match
from tests.env.test_episode_tools import Characters


def echo(text: str) -> str:
    """Say it back."""
    return f"You said {text}."


def add(left: int, right: int = 1) -> str:
    """Add two numbers."""
    return str(left + right)


def scores(score: Callable[[str, Example], float]) -> Any:
    return lambda example, turns: {"score": score(turns[-1].content, example)}


TAGS = "<echo> <add> <answer>"  # a policy would be told more
GOOD = Task(
    name="good",
    prompt=lambda example: f"{TAGS} {example.question}",
    reward=scores(lambda answer, example: exact_match(answer, example.golden_answers)),
    parse_row=lambda row: Example(row["id"], row["question"], (row["gold"],)),
    tools=[echo, add],
    embedded=lambda split: [Example(str(i), f"{i} + {i}?", (str(2 * i),)) for i in range(5)],
)


def changed(**changes: Any) -> Task:
    """The good task with other fields; its prompt names the tags of its tools."""
    tools = changes.get("tools", (echo, add))
    names = [getattr(tool, "name", getattr(tool, "__name__", "")) for tool in tools]
    tags = " ".join(f"<{name}>" for name in (*names, "answer"))
    return dataclasses.replace(GOOD, **{"prompt": lambda example: f"{tags} {example.question}", **changes})


def failures(**changes: Any) -> dict[str, str]:
    env = ToolUseEnv(changed(**changes))
    return {check.name: check.detail for check in check_task(env) if not check.passed}


def test_a_good_task_passes() -> None:
    checks = check_task(ToolUseEnv(GOOD), limit=3)
    names = ["rows", "gold answer", "empty answer", "wrong answer", "prompts", "tool echo", "tool add"]
    names += ["seeds", "episodes"]
    assert [(check.name, check.passed) for check in checks] == [(name, True) for name in names]
    assert "3 score 1" in checks[1].detail
    counted = check_task(ToolUseEnv(GOOD), tokenizer=Characters())
    assert counted[4].detail.startswith(f"longest {len(TAGS) + 7}")


def test_a_task_without_gold_answers_needs_an_expert() -> None:
    even = scores(lambda answer, example: float(answer in ("2", "4")))
    changes = {"reward": even, "embedded": lambda split: [Example("0", "an even number?")]}
    assert "no golden_answers and no expert" in failures(**changes)["gold answer"]
    assert failures(**changes, expert=lambda *_: "<think>x</think><answer>2</answer>") == {}
    assert failures(**changes, expert=lambda *_: "<think>x</think><answer>3</answer>") == {
        "expert": "solves 0 of 1; the first that it does not: example '0' ends with answer, reward 0, turn "
        "'<think>x</think><answer>3</answer>'"
    }
    assert failures(**changes, expert=lambda *_: None) == {
        "expert": "solves 0 of 1, gives up on 1: the tools do not return what it needs, so it can demonstrate nothing"
    }
    assert failures(expert=lambda *_: None) == {}  # here gold answers show that the reward can be reached


def test_a_parameter_may_be_of_any_type() -> None:
    """As one of MCP that pydantic describes elsewhere ($ref) is."""

    class Anything:
        name, description, inline = "anything", "take it", True
        schema: Mapping[str, Any] = {"properties": {"x": {}}, "required": ["x", "undescribed"]}

        def __call__(self, **arguments: Any) -> str:
            return "done"

    (request,) = requests(Anything(), "word")
    assert json.loads(request.argument) == {"x": "word", "undescribed": "word"}


def test_the_experts_turns_have_to_survive_the_tiny_policys_blanks() -> None:
    """A tiny policy writes ``( 1 )`` for ``(1)``: a whole cold start once taught calls that no tool understood."""

    def look(text: str) -> str:
        """Look."""
        return "yes" if text in accepted else "no"

    def expert(example: Example, observations: Sequence[str]) -> str:
        if not observations:
            return "<think>x</think><look>(1)</look>"
        right = example.golden_answers[0] if "yes" in observations[0] else "none"
        return f"<think>x</think><answer>{right}</answer>"

    changes = {"tools": [look], "expert": expert, "vocabulary": lambda: ["1"]}
    accepted = {"(1)", "( 1 )"}
    assert failures(**changes) == {}
    accepted = {"(1)"}
    (said,) = failures(**changes).values()
    assert said.startswith(
        "model=tiny writes blanks around words and marks; with them: solves 0 of 5; the first"
    )
    assert failures(**changes | {"vocabulary": None}) == {}


def test_the_vocabulary_has_to_hold_the_words_of_all_dialogues() -> None:
    """A tiny policy adds those of the first 64; what comes later was silently unknown to it."""

    def expert(example: Example, observations: Sequence[str]) -> str:
        return f"<think>x</think><answer>{example.golden_answers[0]}</answer>"

    rows = [Example(str(i), f"say w{i}", (f"w{i}",)) for i in range(70)]
    changes = {"embedded": lambda split: rows, "expert": expert, "vocabulary": lambda: ["w64"]}
    assert failures(**changes) == {
        "tiny": "the vocabulary lacks 'w65', 'w66', 'w67', 'w68', 'w69' of these dialogues; a tiny policy reads and "
        "writes only its words"
    }
    changes["vocabulary"] = lambda: [f"w{i}" for i in range(64, 70)]
    assert failures(**changes) == {}


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["nq", "--split", "test", "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "task nq: 7 examples, split test, embedded, a sample and not the benchmark"
    assert lines[1].startswith("  ok    rows") and lines[-1] == "all 9 checks passed"
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    data, corpus = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    data.write_text(json.dumps({"question": "Who?", "golden_answers": ["<search>"]}) + "\n")
    corpus.write_text(json.dumps({"id": "0", "contents": '"Who"\nThe band.'}) + "\n")
    assert main(["nq", "--data", str(data), "--search.corpus", str(corpus)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  gold answer" in out
    assert "1 hits: 'Doc 1 (Who): The band.'" in out
    assert out.endswith("1 of 9 checks failed\n")


class Notebook:
    """Stateful as it should be; the variants below leave something out."""

    name, description, inline = "note", "Write a note, or read all of them.", True
    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"do": {"enum": ["read", "write"]}, "text": {"type": "string"}},
        "required": ["do", "text"],
    }

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, do: str, text: str) -> str:
        if do == "write":
            self.notes.append(text)
            return "Noted."
        return "; ".join(self.notes) or "Nothing."

    def new_episode(self, example: Any, seed: int) -> Any:
        return type(self)()


class Sharing(Notebook):
    def new_episode(self, example: Any, seed: int) -> Any:
        made = type(self)()
        made.notes = self.notes
        return made


def shared() -> Any:
    """The same without ``new_episode``."""
    notebook = Notebook()

    def note(do: Literal["read", "write"], text: str) -> str:
        """Take notes."""
        return notebook(do, text)

    return note


def two_functions() -> list[Any]:
    """One writes what the other reads; no object in sight keeps it."""
    kept: dict[str, str] = {}

    def write(text: str) -> str:
        """Write it down."""
        kept[text] = text
        return "Written."

    def read(text: str) -> str:
        """Look whether it was written down."""
        return kept.get(text, "Nothing of that.")

    return [read, write]


def counter() -> Any:
    calls: list[str] = []

    def count(text: str) -> str:
        """Count the calls."""
        calls.append(text)
        return f"Call {len(calls)}."

    return count


@pytest.mark.parametrize("inline", [True, False])
def test_a_tool_that_keeps_state_as_it_should_passes(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notebook, "inline", inline)
    env = ToolUseEnv(changed(tools=[echo, Notebook()]))
    checks = {check.name: check for check in check_task(env)}
    assert all(check.passed for check in checks.values())
    assert "note keeps a state of its own in each" in checks["episodes"].detail


def test_tags_in_the_data_and_those_that_an_expert_teaches_are_no_mistake() -> None:
    asked = [Example(str(i), f"What is <tag{i}> ?", ("x",)) for i in range(2)]
    assert failures(embedded=lambda split: asked) == {}
    expert = lambda example, observations: f"<think>x</think><answer>{2 * int(example.id)}</answer>"  # noqa: E731
    assert failures(prompt=lambda example: example.question, expert=expert) == {}


def divide(left: float, right: float) -> str:
    """Divide two numbers."""
    return str(left / right)


def look_up(name: str) -> str:
    """Look a name up."""
    return {"0 + 0?": "zero", "the answer": "42"}[name]


def leave(name: str) -> str:
    """Look a name up, or leave."""
    if "+" not in name:
        raise SystemExit(0)
    return name


def short(text: str) -> str:
    """Say it back, if it is short."""
    return text if len(text) < 1000 else ""


def out(text: str) -> str:
    """Never there."""
    raise ToolUnavailableError("the cable is cut")


def asks(*examples: Example) -> Any:
    return lambda split: list(examples)


def shows(tags: str) -> Any:
    return lambda example: f"{tags} {example.question}"


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        ({"reward": scores(lambda *_: 0.5)}, "gold answer", "'0' scores 0.5"),
        ({"reward": scores(lambda *_: 1.0)}, "wrong answer", r"scores 1 \{'score': 1.0\}, expected 0"),
        ({"reward": scores(lambda *_: 1.0)}, "empty answer", "'' scores 1"),
        ({"reward": scores(lambda *_: {}["gold"])}, "gold answer", "it raised KeyError: 'gold'"),
        ({"wrong_answer": lambda example: example.golden_answers[0]}, "wrong answer", "'0' scores 1"),
        ({"embedded": asks(Example("0", "q", ("<answer>",)))}, "gold answer", "example '0': '<answer>' scores 0"),
        ({"embedded": asks(Example("0", "q", ("x",)), Example("1", "q"))}, "gold answer", "'1' has no golden_answers"),
        ({"parse_row": lambda row: Example("0", "q")}, "rows", r"parse_row\(\{\}\) succeeds"),
        ({"parse_row": lambda row: row.get("q").strip()}, "rows", "raise KeyError or ValueError naming the column"),
        ({"limits": Limits(max_prompt_tokens=3)}, "prompts", r"longest 6, example '0' \(limit 3; words"),
        ({"prompt": shows("<query> <echo> <add> <answer>")}, "tags", "names <query>, which .* <echo>, <add>, <answer>"),
        ({"prompt": shows("<echo> <answer>")}, "tags", "the prompt does not name <add>, so no policy can know of it"),
        ({"prompt": shows("<echo> and <add>")}, "tags", "the prompt does not name <answer>"),
        ({"tools": [out]}, "tool out", "the cable is cut"),
        ({"tools": [counter()]}, "seeds", "seed 0, turn 1: first "),
        ({"tools": [divide]}, "tool divide", r"asked for '.*\"right\": 0.*': it raised ZeroDiv.*py:\d+\); raise"),
        ({"tools": [look_up]}, "tool look_up", r"asked for '\?': it raised KeyError: .*; raise ToolInputError"),
        ({"tools": [leave]}, "tool leave", r"asked for '\?': it raised SystemExit\(0\), which may not end"),
        ({"tools": [short]}, "tool short", r"an empty reply to 'xxx.*\.\.\.', which tells the policy nothing"),
        ({"tools": [echo, shared()]}, "episodes", "tool note replies .* in a later episode .* Give it new_episode"),
        ({"tools": [echo, counter()]}, "episodes", "tool count replies .* in a later episode .* Give it new_episode"),
        ({"tools": [echo, *two_functions()]}, "episodes", "tool read replies 'Nothing .* remembers earlier episodes"),
        ({"tools": [echo, Sharing()]}, "episodes", "tool note replies .* new_episode, which must not share anything"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task_is_found_and_named(changes: Any, check: str, said: str) -> None:
    settings = ToolSettings(retries=0)
    env = ToolUseEnv(changed(**changes), tool_settings=settings)
    found = {one.name: one.detail for one in check_task(env) if not one.passed}
    assert re.search(said, found[check]), found


def test_an_expert_or_a_reward_that_raises_hides_no_other_check() -> None:
    def expert(example: Example, observations: Sequence[str]) -> str:
        if not observations:
            return "<echo>no thought</echo>"
        return f"<think>x</think><answer>{re.search('said (.*)', observations[-1])[1]}</answer>"  # type: ignore[index]

    fails = scores(lambda *_: {}["gold"])
    assert "tool divide" in failures(reward=fails, tools=[divide])
    found = failures(expert=expert, limits=Limits(max_prompt_tokens=3))
    assert list(found) == ["prompts", "expert"]
    said = r"example '0', turn 1: it raised TypeError: .* \(.*\.py:\d+\), after it saw '<info"
    assert re.match(said, found["expert"])
    assert "Invalid turn" in found["expert"]


@pytest.mark.parametrize("gold", ["A", "!!", "The The", "A+"])
def test_gold_answers_of_which_normalization_leaves_nothing(gold: str) -> None:
    def judged(match: Any) -> dict[str, str]:
        reward = scores(lambda answer, example: match(answer, example.golden_answers) if answer else 0.0)
        return failures(embedded=asks(Example("0", "which?", (gold,))), reward=reward)

    assert "'...' scores 1" in judged(exact_match)["empty answer"]
    assert judged(answer_match) == {}

"""sorl-check-task: what it finds, and what it says."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_env import Example, Limits, Task, ToolUnavailableError, ToolUseEnv
from sorl_env.check_task import check_task, main
from sorl_env.rewards import answer_match, exact_match


def reward(example: Example, turns: Sequence[Any]) -> Mapping[str, float]:
    return {"exact_match": exact_match(turns[-1].content, example.golden_answers)}


def echo(text: str) -> str:
    """Say it back."""
    return f"You said {text}."


def add(left: int, right: int = 1) -> str:
    """Add two numbers."""
    return str(left + right)


TAGS = "<echo> <add> <answer>"  # a policy would be told more
GOOD = Task(
    name="good",
    prompt=lambda example: f"{TAGS} {example.question}",
    reward=reward,
    parse_row=lambda row: Example(row["id"], row["question"], (row["gold"],)),
    tools=[echo, add],
    embedded=lambda split: [Example(str(i), f"{i} + {i}?", (str(2 * i),)) for i in range(5)],
)


def changed(**changes: Any) -> Task:
    """The good task with other fields; its prompt names the tags of its tools."""
    names = [
        getattr(tool, "name", getattr(tool, "__name__", "")) for tool in changes.get("tools", (echo, add))
    ]
    tags = " ".join(f"<{name}>" for name in (*names, "answer"))
    return dataclasses.replace(GOOD, **{"prompt": lambda example: f"{tags} {example.question}", **changes})


def failures(**changes: Any) -> dict[str, str]:
    env = ToolUseEnv(changed(**changes))
    return {check.name: check.detail for check in check_task(env) if not check.passed}


def test_a_good_task_passes() -> None:
    checks = check_task(ToolUseEnv(GOOD), limit=3)
    assert [check.name for check in checks if check.passed] == [
        "rows",
        "gold answer",
        "empty answer",
        "wrong answer",
        "prompts",
        "tool echo",
        "tool add",
        "seeds",
        "episodes",
    ]
    assert len(checks) == 9
    assert "3 score 1" in checks[1].detail


def test_rewards_that_break_the_contract() -> None:
    assert "'0' scores 0.5" in failures(reward=lambda example, turns: {"half": 0.5})["gold answer"]
    generous = failures(reward=lambda example, turns: {"always": 1.0})
    assert set(generous) == {"empty answer", "wrong answer"}
    assert "scores 1 {'always': 1.0}, expected 0" in generous["wrong answer"]
    assert "wrong answer" in failures(wrong_answer=lambda example: example.golden_answers[0])


def test_gold_answers_that_cannot_be_given() -> None:
    nested = [Example("0", "q", ("<answer>",))]
    assert "example '0': '<answer>' scores 0" in failures(embedded=lambda split: nested)["gold answer"]
    some = [Example("0", "q", ("x",)), Example("1", "q")]
    assert "example '1' has no golden_answers" in failures(embedded=lambda split: some)["gold answer"]


def test_a_task_without_gold_answers_needs_an_expert() -> None:
    def judged(example: Example, turns: Sequence[Any]) -> Mapping[str, float]:
        return {"even": float(turns[-1].content in ("2", "4"))}

    changes = {"reward": judged, "embedded": lambda split: [Example("0", "an even number?")]}
    assert "no golden_answers and no expert" in failures(**changes)["gold answer"]
    good = lambda example, observations: "<think>x</think><answer>2</answer>"  # noqa: E731
    assert failures(**changes, expert=good) == {}
    bad = lambda example, observations: "<think>x</think><answer>3</answer>"  # noqa: E731
    assert failures(**changes, expert=bad) == {
        "expert": "solves 0 of 1; the first that it does not: example '0' ends with answer, reward 0, turn "
        "'<think>x</think><answer>3</answer>'"
    }
    assert failures(**changes, expert=lambda *_: None) == {"expert": "solves 0 of 1, gives up on 1"}
    assert (
        failures(expert=lambda *_: None) == {}
    )  # the gold answers have shown that the reward can be reached


def test_prompts_that_are_too_long() -> None:
    detail = failures(limits=Limits(max_prompt_tokens=3))["prompts"]
    assert "longest 6, example '0' (limit 3; words" in detail


def test_a_tokenizer_counts_exactly() -> None:
    class Letters:
        chat_template = None
        eos_token_id = None

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(map(chr, token_ids))

        def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
            raise AssertionError("there is no template")

    checks = check_task(ToolUseEnv(GOOD), tokenizer=Letters())
    assert next(check.detail for check in checks if check.name == "prompts").startswith(
        f"longest {len(TAGS) + 7}"
    )


def test_tools_that_are_out_or_silent_or_random() -> None:
    def out(text: str) -> str:
        """Never there."""
        raise ToolUnavailableError("the cable is cut")

    def silent(text: str) -> str:
        """Say nothing."""
        return " "

    calls: list[str] = []

    def forgetful(text: str) -> str:
        """Never say the same twice."""
        calls.append(text)
        return f"reply {len(calls)}"

    from sorl_env import ToolSettings

    env = ToolUseEnv(changed(tools=[out]), tool_settings=ToolSettings(retries=0))
    assert any("the cable is cut" in check.detail for check in check_task(env) if check.name == "tool out")
    assert "an empty reply" in failures(tools=[silent])["tool silent"]
    assert "seed 0, turn 1: first " in failures(tools=[forgetful])["seeds"]


def test_rows_must_be_refused_clearly() -> None:
    assert "parse_row({}) succeeds" in failures(parse_row=lambda row: Example("0", "q"))["rows"]
    unclear = failures(parse_row=lambda row: Example("0", row.get("question").strip()))
    assert "not a KeyError or ValueError that names the column" in unclear["rows"]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nq", "--split", "test", "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "task nq: 7 examples, split test, embedded, a sample and not the benchmark"
    assert lines[1].startswith("  ok    rows")
    assert lines[-1] == "all 9 checks passed"


def test_command_line_with_data_and_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    data, corpus = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    data.write_text(json.dumps({"question": "Who?", "golden_answers": ["<search>"]}) + "\n")
    corpus.write_text(json.dumps({"id": "0", "contents": '"Who"\nThe band.'}) + "\n")
    assert main(["nq", "--data", str(data), "--search.corpus", str(corpus)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  gold answer" in out
    assert "1 hits: 'Doc 1 (Who): The band.'" in out
    assert out.endswith("1 of 9 checks failed\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hotpotq"], "Did you mean 'hotpotqa'"),
        (["nq", "--data", "nowhere/q.jsonl"], "no such file or folder"),
        (["nq", "--search.corpus", "nowhere.jsonl"], "nowhere.jsonl: no such corpus"),
        (["nq", "--search.url", "nowhere"], "give an address such as"),
        (["nq", "--tokenizer", "nowhere"], "nowhere: no tokenizer there"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("sorl-check-task: ")
    assert message in error


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

    def new_episode(self, seed: int) -> Any:
        return type(self)()


class Sharing(Notebook):
    def new_episode(self, seed: int) -> Any:
        made = type(self)()
        made.notes = self.notes
        return made


class Shared:
    """The same without the hook."""

    name, description, inline, schema = "note", "Notes.", True, Notebook.schema

    def __init__(self) -> None:
        self.inner = Notebook()

    def __call__(self, do: str, text: str) -> str:
        return self.inner(do, text)


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


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([echo, Shared()], "tool note replies .* in a later episode .* Give it new_episode"),
        ([echo, counter()], "tool count replies .* in a later episode .* Give it new_episode"),
        ([echo, *two_functions()], "tool read replies 'Nothing of that.' .* remembers earlier episodes"),
        ([echo, Sharing()], "tool note replies .* new_episode returns must not share anything"),
    ],
    ids=["object", "function", "two functions", "shared"],
)
def test_state_that_reaches_another_episode_is_found_and_named(tools: list[Any], said: str) -> None:
    found = failures(tools=tools)
    assert re.search(said, found["episodes"]), found


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            "<query> <echo> <add> <answer>",
            r"the prompt names <query>, which no tool reads; .* <echo>, <add>, <answer>",
        ),
        ("<echo> <answer>", "the prompt does not name <add>, so no policy can know of it"),
        ("<echo> and <add>", "the prompt does not name <answer>"),
        ("Answer:", "the prompt does not name <echo>"),
    ],
)
def test_tags_that_the_prompt_names_wrongly_or_not_at_all(prompt: str, said: str) -> None:
    assert re.match(said, failures(prompt=lambda example: f"{prompt} {example.question}")["tags"])


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


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (divide, r"asked for '.*\"right\": 0.*': it raised ZeroDivisionError: .* \(.*py:\d+\); raise"),
        (look_up, r"asked for '\?': it raised KeyError: .*; raise ToolInputError, whose text the policy then reads"),
        (leave, r"asked for '\?': it raised SystemExit\(0\), which may not end this process"),
        (short, r"an empty reply to 'xxx.*\.\.\.', which tells the policy nothing"),
    ],
)  # fmt: skip
def test_a_tool_that_trips_over_junk(tool: Any, said: str) -> None:
    found = failures(tools=[tool])
    assert re.match(said, found[f"tool {tool.__name__}"]), found


def test_an_expert_that_trips_hides_no_other_check() -> None:
    def expert(example: Example, observations: Sequence[str]) -> str:
        if not observations:
            return "<echo>no thought</echo>"
        return f"<think>x</think><answer>{re.search('said (.*)', observations[-1])[1]}</answer>"  # type: ignore[index]

    found = failures(expert=expert, limits=Limits(max_prompt_tokens=3))
    assert list(found) == ["prompts", "expert"]
    assert re.match(
        r"example '0', turn 1: it raised TypeError: .* \(.*\.py:\d+\), after it saw '<info", found["expert"]
    )
    assert "Invalid turn" in found["expert"]


def test_a_reward_that_trips_hides_no_other_check() -> None:
    def trips(example: Example, turns: Sequence[Any]) -> Mapping[str, float]:
        raise KeyError("gold")

    found = failures(reward=trips, tools=[divide])
    assert "it raised KeyError: 'gold'" in found["gold answer"] and "tool divide" in found


@pytest.mark.parametrize("gold", ["A", "!!", "The The", "A+"])
def test_gold_answers_of_which_normalization_leaves_nothing(gold: str) -> None:
    def judged(match: Any) -> dict[str, str]:
        def judge(example: Example, turns: Sequence[Any]) -> Mapping[str, float]:
            answered = turns[-1].kind == "answer"
            return {"match": match(turns[-1].content, example.golden_answers) if answered else 0.0}

        return failures(embedded=lambda split: [Example("0", "which?", (gold,))], reward=judge)

    assert "'...' scores 1" in judged(exact_match)["empty answer"]
    assert judged(answer_match) == {}

"""The client of a served model, against a real server on loopback that runs a small model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sorl_env.errors import UserError
from sorl_env.rollout import SamplingParams
from sorl_train.evaluate.cli import main
from sorl_train.evaluate.endpoint import EndpointSampler, TextTokenizer, with_stop_string

from .completions_server import Served, serving
from .conftest import LARGER, WORLD

STOP = ("</search>", "</answer>")


@pytest.fixture(scope="module")
def folder(run_folder: Path) -> str:
    return str(run_folder / "checkpoints" / "best" / "policy")


@pytest.fixture
def vllm(folder: str) -> Iterator[Served]:
    with serving(folder, vllm=True) as served:
        yield served


def evaluate(out: Path, *options: str, world: dict[str, Any] = WORLD) -> list[dict[str, Any]]:
    knobs = [f"--task_args.{key}={value}" for key, value in world.items()]
    command = ["--task", "minihop", *knobs, "--quiet", "--hardware.threads", "1", "--out", str(out)]
    assert main([*options, *command]) == 0
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def served_as(served: Served, *options: str) -> list[str]:
    return ["--endpoint", served.url, "--model_name", "tiny", *options]


def compared(row: dict[str, Any], whole: bool) -> Any:
    """An answer and its turns; unless ``whole``, without the text of invalid ones: a server that leaves out what ended
    a text, and does not say what it was, hides a closing tag that closes nothing."""
    hidden = ("text", "token_ids")
    turns = [
        turn
        if whole or turn["kind"] != "invalid"
        else {name: value for name, value in turn.items() if name not in hidden}
        for turn in row["turns"]
    ]
    return turns, row["answer"]


@pytest.mark.slow  # trains a policy that gives answers
def test_a_served_model_answers_as_the_same_model_does_here(trained_run: Path, tmp_path: Path) -> None:
    trained = str(trained_run / "checkpoints" / "best" / "policy")
    modes = ["--mode", "direct", "cot", "rag", "agent", "--limit", "30"]
    here = evaluate(tmp_path / "here", trained, *modes, world=LARGER)
    assert len(here) == 120 and any(row["scores"]["em"] for row in here)
    for vllm_like in (True, False):
        with serving(trained, vllm=vllm_like) as served:
            options = served_as(served, "--tokenizer", trained)
            there = evaluate(tmp_path / f"there{vllm_like}", *options, *modes, world=LARGER)
            assert all(isinstance(body["prompt"], list) for body in served.requests)
        assert [compared(row, vllm_like) for row in there] == [compared(row, vllm_like) for row in here]


def test_without_a_tokenizer_prompts_go_out_as_text(
    vllm: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORL_API_KEY", "secret")
    rows = evaluate(tmp_path / "out", *served_as(vllm), "--mode", "agent", "--limit", "3")
    assert len(rows) == 3 and vllm.requests[0]["prompt"] in {row["prompt"] for row in rows}
    assert all(turn["token_ids"] is None for row in rows for turn in row["turns"])
    assert {request["token"] for request in vllm.requests} == {"Bearer secret"}
    assert not any("secret" in path.read_text() for path in (tmp_path / "out").iterdir())
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert "estimates" in settings["policy"]["tokenizer"]


def test_a_session_that_failed_leaves_no_client() -> None:
    sampler = EndpointSampler("http://127.0.0.1:9/v1", "tiny", TextTokenizer())

    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            async with sampler.session():
                raise ZeroDivisionError
        await sampler.generate("a", sampler._tokenizer.encode("x"), SamplingParams(1))

    with pytest.raises(AssertionError, match="use it inside session"):
        asyncio.run(fail())


@pytest.mark.parametrize("faults", [[503, 0, 429, 500], [0]])
def test_what_passes_is_tried_again(
    vllm: Served, tmp_path: Path, folder: str, faults: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sorl_train.evaluate.endpoint._BACKOFF_S", 0.01)
    vllm.faults = list(faults)
    rows = evaluate(
        tmp_path / "out", *served_as(vllm, "--tokenizer", folder), "--mode", "direct", "--limit", "4"
    )
    assert len(rows) == 4 and not vllm.faults
    assert len(vllm.requests) == 4 + len(faults)


def test_a_refusal_and_an_outage_stop_the_evaluation_with_the_reason(
    vllm: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--task", "minihop", "--mode", "direct", "--limit", "2", "--quiet"]
    wrong = ["--endpoint", vllm.url, "--model_name", "large"]
    assert main([*common, *wrong, "--out", str(tmp_path / "a")]) == 2
    assert "refused a request of model 'large': HTTP 404" in capsys.readouterr().err
    nobody = ["--endpoint", "http://127.0.0.1:9/v1", "--model_name", "tiny", "--timeout_s", "0.3"]
    assert main([*common, *nobody, "--out", str(tmp_path / "b")]) == 2
    assert "has not answered for 0.3 s" in capsys.readouterr().err


def test_an_evaluation_stopped_by_an_outage_goes_on_when_the_server_is_back(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--task minihop --mode direct --limit 12 --sampler.max_concurrency 1 --quiet".split()
    options += ["--limits.max_new_tokens", "6"]
    with serving(folder, vllm=True) as served:
        whole = evaluate(tmp_path / "whole", *served_as(served, *options[2:]))
    with serving(folder, vllm=True) as served:
        command = [*served_as(served, "--timeout_s", "2"), *options]
        knobs = [f"--task_args.{key}={value}" for key, value in WORLD.items()]
        command += [*knobs, "--out", str(tmp_path / "broken")]
        served.requests = Stopper(served)  # type: ignore[assignment]
        assert main(command) == 2
        assert "the answers so far are kept" in capsys.readouterr().err
        kept = (tmp_path / "broken" / "results.jsonl").read_text().splitlines()
        assert 1 <= len(kept) < 12
        served.requests, served.faults = [], []
        assert main(command) == 0
        assert len(served.requests) == 12 - len(kept)
    lines = (tmp_path / "broken" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == whole


class Stopper(list[dict[str, Any]]):
    """Lets a server fail for good after five requests."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._served = served

    def append(self, body: dict[str, Any]) -> None:
        super().append(body)
        if len(self) > 5:
            self._served.faults = [503]


def test_a_text_tokenizer_loses_nothing() -> None:
    tokenizer = TextTokenizer()
    for text in ("", "Who wrote it?\n\n<search> naïve 東京 </search>\t  x", "extraordinarily long words"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("extraordinarily long")) == 5  # extr aord inar ily, and " long"


@pytest.mark.parametrize(
    ("text", "choice", "whole"),
    [
        ("<think>a</think><search>who", {"stop_reason": "</search>"}, "<think>a</think><search>who</search>"),
        ("<search>who", {"matched_stop": "</search>"}, "<search>who</search>"),
        ("<think>a</think><search>who", {}, "<think>a</think><search>who</search>"),
        ("<search>x</search>", {}, "<search>x</search>"),
        ("<think>a</think><answer>x", {}, "<think>a</think><answer>x</answer>"),
        ("no tags", {}, "no tags"),
        # an end-of-text token inside a block: vLLM says null or the token's id, SGLang the id
        ("<think>a</think><answer>x", {"stop_reason": None}, "<think>a</think><answer>x"),
        ("<think>a</think><answer>x", {"stop_reason": 2}, "<think>a</think><answer>x"),
        ("<think>a</think><answer>x", {"matched_stop": 2}, "<think>a</think><answer>x"),
    ],
)
def test_a_stop_string_that_was_left_out_is_put_back(text: str, choice: dict[str, Any], whole: str) -> None:
    assert with_stop_string(text, choice, STOP) == whole


def test_an_end_of_text_inside_a_block_is_not_its_closing_tag(
    vllm: Served, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 behind vLLM wrote '<answer> The answer is: 1998' and ended its text: that is no answer."""
    ids = [*vllm.tokenizer.encode("<think> </think> <answer> founder"), vllm.tokenizer.eos_token_id]

    async def complete(body: dict[str, Any]) -> dict[str, Any]:
        text = vllm.tokenizer.decode(ids, skip_special_tokens=True)
        return {"text": text, "finish_reason": "stop", "stop_reason": None, "token_ids": ids}

    monkeypatch.setattr(vllm, "complete", complete)
    options = served_as(vllm, "--tokenizer", folder, "--mode", "agent", "--limit", "1")
    (row,) = evaluate(tmp_path / "out", *options, "--limits.max_turns", "1")
    (turn,) = row["turns"]
    assert turn["token_ids"] == ids and turn["kind"] == "invalid" and row["answer"] is None


def reply_of(body: bytes) -> str:
    """The text of a turn that a server sends so."""
    tokenizer = TextTokenizer()
    sampler = EndpointSampler("http://127.0.0.1:9/v1", "m", tokenizer)

    async def draw() -> str:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
        async with httpx.AsyncClient(transport=transport) as sampler._client:
            sampled = await sampler.generate("s", tokenizer.encode("who?"), SamplingParams(8, stop=STOP))
        return tokenizer.decode(sampled.token_ids)

    return asyncio.run(draw())


def test_half_surrogate_pairs_of_a_served_model_are_replaced() -> None:
    body = json.dumps(
        {"choices": [{"text": "\ud800 x \ud83d\ude00</answer>", "finish_reason": "stop"}]}
    ).encode()
    assert reply_of(body) == "\ufffd x \U0001f600</answer>"


@pytest.mark.parametrize("body", [b"[" * 100_000, b"1" * 5000, b"\xff", b"<html>", b'{"choices": []}', b"[]"])
def test_what_is_no_reply_is_a_clear_error(body: bytes) -> None:
    with pytest.raises(UserError, match=r"the reply is not JSON|not a reply of /v1/completions"):
        reply_of(body)

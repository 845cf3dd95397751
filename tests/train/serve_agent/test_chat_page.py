"""The chat page of ``sorl-serve-agent`` in a real browser, and OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..report.browser import Browser
from .test_serve_agent import CHAT, Server, asking, served

ONE_POLICY = ("--hardware.threads", "1", "--sampler.max_concurrency", "4")


@pytest.fixture(scope="module")
def server(cold_started_run: Path) -> Iterator[Server]:
    with served("--model", str(cold_started_run), *ONE_POLICY) as started:
        yield started


def address(server: Server) -> str:
    return str(server.client.base_url)


def ask(browser: Browser, question: str, *, wait: bool = True) -> None:
    browser.run(
        f"document.getElementById('question').value = {json.dumps(question)};"
        "document.getElementById('ask').requestSubmit(); 0"
    )
    if wait:
        browser.wait_for("!document.getElementById('send').disabled")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")


# --- the page -------------------------------------------------------------------------------------------------
def test_the_page_shows_the_dialogue_that_the_server_answers(server: Server, browser: Browser) -> None:
    browser.open(address(server))
    examples = texts(browser, "#examples button")
    assert len(examples) == 3
    browser.run("document.querySelector('#examples button').click()")
    assert browser.run("document.getElementById('question').value") == examples[0]
    ask(browser, examples[0])
    expected = server.client.post(CHAT, json=asking(examples[0])).json()
    turns = expected["sorl"]["turns"]
    assert texts(browser, ".asked") == [examples[0]]
    assert texts(browser, ".turn pre") == [turn["text"] for turn in turns]
    assert texts(browser, ".observation pre") == [t["observation"].strip() for t in turns if t["observation"]]
    assert texts(browser, ".call q") == [call["argument"].strip() for t in turns for call in t["tool_calls"]]
    assert texts(browser, ".said") == [expected["choices"][0]["message"]["content"] or "No answer."]
    assert texts(browser, ".chat-status") == [f"ended: {expected['sorl']['stop_reason']}"]
    assert browser.run("document.getElementById('question').value") == ""
    assert browser.complaints() == []
    assert {request.removeprefix(address(server)) for request in browser.requests()} <= {"/", CHAT, "data:,"}


def test_text_of_a_question_is_never_markup(server: Server, browser: Browser) -> None:
    browser.open(address(server))
    ask(browser, "<img src=x onerror=alert(1)> <b>who</b> wrote it?")
    assert texts(browser, ".asked") == ["<img src=x onerror=alert(1)> <b>who</b> wrote it?"]
    assert browser.run("document.querySelectorAll('main img, main .asked b').length") == 0
    (status,) = texts(browser, ".chat-status")
    assert status.startswith("ended: ") and "words that this policy cannot read: " in status
    assert browser.complaints() == []


def test_a_refusal_and_a_server_that_went_away_are_told_on_the_page(
    cold_started_run: Path, browser: Browser
) -> None:
    with served("--model", str(cold_started_run), *ONE_POLICY) as started:
        browser.open(address(started))
        ask(browser, "who " * 2000)
        (status,) = texts(browser, ".chat-status.fault")
        assert "shorten it" in status
        kept = browser.run("document.getElementById('question').value")
        assert kept.startswith("who who")  # nothing is lost
        started.end()
    ask(browser, "who wrote it?")
    assert len(texts(browser, ".chat-status.fault")) == 2
    assert not browser.run("document.getElementById('send').disabled")


def test_a_server_with_a_token_shows_no_questions_and_takes_the_token(
    cold_started_run: Path, browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-secret-of-this-test\n")
    options = ("--model", str(cold_started_run), *ONE_POLICY, "--token_file", str(tmp_path / "token"))
    with served(*options) as started:
        page = started.client.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert "a-secret-of-this-test" not in page.text
        browser.open(address(started))
        assert texts(browser, "#examples button") == []
        for given in ("wrong", "a-secret-of-this-test"):
            browser.run(f"document.getElementById('token').value = '{given}'")
            ask(browser, "who wrote it?")
        refused, ended = texts(browser, ".chat-status")
        assert refused == "wrong token" and ended.startswith("ended: ")
        assert started.client.post("/").status_code == 405


# --- OpenAI's client ------------------------------------------------------------------------------------------
def test_openai_s_client_asks_and_streams(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="needs OpenAI's client: pip install openai")
    question = "What is the employer of nobody?"
    with openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["agent"]
        asked: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": question}]}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert (content or None) == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        happened = [chunk.sorl for chunk in chunks if getattr(chunk, "sorl", None)]
        replies = [event["reply"] for event in happened if "reply" in event]
        assert [reply["text"] for reply in replies] == [turn["text"] for turn in whole.sorl["turns"]]
        assert happened[-1] == whole.sorl
        with pytest.raises(openai.BadRequestError, match="this server does not support that"):
            client.chat.completions.create(**asked, n=2)

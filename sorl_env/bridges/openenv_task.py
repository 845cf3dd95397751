"""``openenv:URL``: the environment of an OpenEnv server, as a task to train on or to evaluate."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from sorl_env.bridges.openenv_client import KEY, PROTOCOL, OpenEnvSession, Server, ToAction
from sorl_env.bridges.session_env import (
    SEEDS_OF_A_SPLIT,
    Format,
    check_settings,
    seeded_examples,
    session_task,
)
from sorl_env.errors import UserError
from sorl_env.task.task import Example, Limits, Task
from sorl_env.text import quoted, read_json
from sorl_env.tool.tool import ToolInputError

TOKEN_VARIABLE = "SORL_OPENENV_TOKEN"
_ASK_S = 10.0
_MAX_BYTES = 4 << 20


def openenv_task(
    url: str,
    *,
    field: str | None = None,
    format: Format = "action",
    stop: Sequence[str] = (),
    instruction: str | None = None,
    examples: int = 1000,
    max_turns: int = 8,
    timeout_s: float = 60.0,
    wait_s: float = 300.0,
) -> Task:
    """The task that a server plays. A server of ``sorl-serve-env`` says itself what the first six settings are for.

    The environment variable ``SORL_OPENENV_TOKEN`` is sent as a bearer token. Times are in seconds.

    Args:
        url: as ``http://127.0.0.1:8303``.
        field: of an observation: what the policy reads. By default its only text field, or else all of it as JSON.
        format, stop, instruction: see ``SessionEnv``.
        examples: number of episodes in each split of a server that has no tasks; an episode is then a seed.
        timeout_s, wait_s: see ``Server``.

    Raises:
        UserError: the server cannot be reached, or is not one of OpenEnv.
    """
    check_settings(format, examples, timeout_s=timeout_s, wait_s=wait_s)
    http = _Http(url)
    schema, state = http.ask("/schema"), http.ask("/state")
    if not isinstance(schema, dict) or not isinstance(state, dict):
        raise UserError(f"{http.where}: that is not what an OpenEnv server says; is the address right?")
    limits, system_prompt = Limits(max_turns=max_turns), None
    to_action: ToAction = lambda text: {"message": text}  # noqa: E731
    facts = state.get(KEY)
    if facts is None:
        to_action = _action_maker(http.where, schema.get("action"))
    else:
        limits, stop = _read_facts(http.where, facts)
        instruction, field, system_prompt = "", "text", facts.get("system_prompt")
    is_sorl = facts is not None
    server = Server(http.url, is_sorl, to_action, _text_reader(field), timeout_s, wait_s, http.token)
    return session_task(
        f"openenv:{http.url}",
        f"the OpenEnv environment at {http.url}",
        limits,
        lambda: OpenEnvSession(server),
        lambda split: _episodes(http, split, examples),
        format="raw" if is_sorl else format,
        stop=stop,
        instruction=instruction,
        system_prompt=system_prompt,
    )


def _read_facts(where: str, facts: Any) -> tuple[Limits, Sequence[str]]:
    """The limits and the stop strings of a task that ``sorl-serve-env`` serves."""
    try:
        if facts["protocol"] == PROTOCOL:
            return Limits(**facts["limits"]), tuple(map(str, facts["stop"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: what it says of its task cannot be read: {error!r}") from error
    raise UserError(
        f"{where}: the server is a sorl-serve-env of protocol {facts['protocol']}, this is {PROTOCOL}: install "
        "the same version of sorl on both sides"
    )


def _episodes(http: _Http, split: str, count: int) -> tuple[Example, ...]:
    """The tasks of a server that lists them (OpenEnv's Task API), or else seeds."""
    names = http.ask("/list_environments", optional=True)
    lists_tasks = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    found = http.ask(f"/{names[0]}/num_tasks", {"split": split}, optional=True) if lists_tasks else None
    if not isinstance(found, dict):
        return seeded_examples(http.where, split, count)
    number = found.get("num_tasks")
    if not isinstance(number, int) or not 0 <= number <= SEEDS_OF_A_SPLIT:
        raise UserError(f"{http.where}: it says that split {split!r} has {quoted(str(number))} tasks")
    return tuple(
        Example(id=f"{split}-{index}", question="", metadata={"split": split, "index": index})
        for index in range(number)
    )


def _action_maker(where: str, schema: Any) -> ToAction:
    """How a text becomes an action of this schema: the value of its only field, or a JSON object."""
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        raise UserError(f"{where}: /schema has no schema of an action: is this an OpenEnv server?")
    fields = {name: about for name, about in schema["properties"].items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    only = required[0] if len(required) == 1 else None
    kind = fields[only].get("type") if only is not None and isinstance(fields[only], dict) else None
    if only is not None and kind == "string":
        return lambda text: {only: text}
    is_plain = kind in ("integer", "number", "boolean")
    wanted = f"a JSON value of type {kind}" if is_plain else f"a JSON object with {', '.join(fields)}"

    def to_action(text: str) -> Mapping[str, Any]:
        try:
            value = read_json(text)
        except ValueError as error:
            said = f"This action is not possible here: it must be {wanted}, but {error}"
            raise ToolInputError(said) from error
        if isinstance(value, dict):
            return value
        if is_plain:
            return {str(only): value}
        raise ToolInputError(f"This action is not possible here: it must be {wanted}")

    return to_action


def _text_reader(field: str | None) -> Callable[[Mapping[str, Any]], str]:
    def to_text(observation: Mapping[str, Any]) -> str:
        shown: Any = {name: value for name, value in observation.items() if name != "metadata"}
        texts = [value for value in shown.values() if isinstance(value, str)]
        if field is not None:
            shown = shown.get(field)
        elif len(texts) == 1:
            shown = texts[0]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    return to_text


class _Http:
    """The questions that are asked once, before the first episode."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.where = f"openenv:{url}"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{self.where}: write openenv:http://HOST:PORT")
        self.url = url.rstrip("/")
        self.token = os.environ.get(TOKEN_VARIABLE)

    def ask(self, path: str, body: Any = None, *, optional: bool = False) -> Any:
        """The JSON that answers a GET, or the POST of a body; None where an optional page is not there."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        method, content = "GET" if body is None else "POST", bytearray()
        deadline = time.monotonic() + 3 * _ASK_S
        try:
            with httpx.stream(
                method, self.url + path, json=body, headers=headers, timeout=_ASK_S
            ) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > _MAX_BYTES or time.monotonic() > deadline:
                        most = f"longer than {_MAX_BYTES:,} bytes or takes too long"
                        raise UserError(f"{self.where}: its answer to {path} is {most}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise UserError(
                f"{self.where} does not answer ({why}): start it or correct the address"
            ) from error
        if response.status_code == 401:
            raise UserError(f"{self.where} wants a token: set the environment variable {TOKEN_VARIABLE}")
        if optional and response.status_code in (404, 405, 501):
            return None
        if response.status_code != 200:
            said = quoted(content[:500].decode("utf-8", "replace"), 200)
            raise UserError(f"{self.where}: {path} answers {response.status_code}: {said}")
        try:
            return read_json(bytes(content))
        except ValueError as error:
            raise UserError(f"{self.where}: its answer to {path} cannot be read: {error}") from error

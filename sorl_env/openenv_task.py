"""``openenv:URL``: the environment of an OpenEnv server, as a task to train on or to evaluate."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx

from sorl_env.data import ExampleSet
from sorl_env.errors import UserError
from sorl_env.openenv_client import OpenEnvSession, Server, ToAction
from sorl_env.openenv_wire import KEY, PROTOCOL, limits_of
from sorl_env.session_env import INSTRUCTION, Format, SessionEnv, seeded_examples, session_task
from sorl_env.task import Example, Limits, Task
from sorl_env.text import quoted, read_json
from sorl_env.tool import ToolInputError

TOKEN_VARIABLE = "SORL_OPENENV_TOKEN"
_PREFIX = "openenv:"
_ASK_S = 10.0
_MAX_BYTES = 4 << 20
_MAX_EXAMPLES = 10_000_000
_SPLITS = ("train", "validation", "test")
_PLAIN = ("string", "integer", "number", "boolean")


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
    max_reply_mb: int = 4,
) -> Task:
    """The task that a server plays. A server of ``sorl-serve-env`` says itself what the first six settings are for.

    The environment variable ``SORL_OPENENV_TOKEN`` is sent as a bearer token.

    Args:
        url: as ``http://127.0.0.1:8000``.
        field: of an observation: what the policy reads. By default its only text field, or else all of it as JSON.
        format, stop, instruction: see ``SessionEnv``.
        examples: number of episodes in each split of a server that has no tasks; an episode is then a seed.
        timeout_s, wait_s, max_reply_mb: see ``Server``.

    Raises:
        UserError: the server cannot be reached, or is not one of OpenEnv.
    """
    _check_settings(format, {"timeout_s": timeout_s, "wait_s": wait_s}, examples, max_reply_mb)
    http = _Http(url)
    schema, state = http.get("/schema"), http.get("/state")
    facts = state.get(KEY)
    form: Format = format if facts is None else "raw"
    limits, ends = Limits(max_turns=max_turns), tuple(stop)
    begins = instruction if instruction is not None else INSTRUCTION if format == "action" else ""
    if facts is not None:
        field, begins = "text", ""
        limits, ends = _read_facts(url, facts)
    server = Server(
        url=http.url,
        is_sorl=facts is not None,
        to_action=_action_maker(url, schema.get("action"), is_sorl=facts is not None),
        to_text=_text_reader(field),
        timeout_s=timeout_s,
        wait_s=wait_s,
        max_reply_bytes=max_reply_mb << 20,
        token=http.token,
    )

    def environment(task: Task, given: ExampleSet, chosen: Limits) -> SessionEnv:
        opens = partial(OpenEnvSession, server)
        return SessionEnv(task, given, chosen, opens, format=form, stop=ends, instruction=begins)

    return session_task(
        f"{_PREFIX}{http.url}",
        limits,
        f"the OpenEnv environment at {http.url}",
        environment=environment,
        embedded=lambda split: _episodes(http, split, examples, is_sorl=facts is not None),
        system_prompt=None if facts is None else facts.get("system_prompt"),
    )


def _check_settings(format: str, seconds: Mapping[str, float], examples: int, max_reply_mb: int) -> None:
    for name, value in seconds.items():
        if not math.isfinite(value) or not 0 < value <= 86400:
            raise UserError(f"{name} must be above 0 and at most 86400, not {value}")
    for name, number, most in (("examples", examples, _MAX_EXAMPLES), ("max_reply_mb", max_reply_mb, 1024)):
        if not 1 <= number <= most:
            raise UserError(f"{name} must be from 1 to {most:,}, not {number}")
    if format not in ("action", "raw"):
        raise UserError(f"format must be action or raw, not {format!r}")
    if find_spec("websockets") is None:
        raise UserError(f"{_PREFIX[:-1]} tasks need the package websockets: pip install 'sorl[train]'")


def _read_facts(url: str, facts: Any) -> tuple[Limits, tuple[str, ...]]:
    """The limits and the stop strings of a task that ``sorl-serve-env`` serves."""
    try:
        if facts["protocol"] != PROTOCOL:
            raise UserError(
                f"{_PREFIX}{url}: the server is a sorl-serve-env of protocol {facts['protocol']}, this is {PROTOCOL}: "
                "install the same version of sorl on both sides"
            )
        return limits_of(facts), tuple(map(str, facts["stop"]))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{_PREFIX}{url}: what it says of its task cannot be read: {error!r}") from error


def _episodes(http: _Http, split: str, count: int, *, is_sorl: bool) -> tuple[Example, ...]:
    """The tasks of a server that lists them (OpenEnv's Task API), or else seeds."""
    name = http.environment()
    found = None if name is None else http.post(f"/{name}/num_tasks", {"split": split})
    if found is None:
        if split not in _SPLITS:
            raise UserError(
                f"{_PREFIX}{http.url} has no splits of its own: choose one of {', '.join(_SPLITS)}"
            )
        return seeded_examples(count, _SPLITS.index(split) * _MAX_EXAMPLES)
    number = found.get("num_tasks")
    if not isinstance(number, int) or not 0 <= number <= _MAX_EXAMPLES:
        raise UserError(f"{_PREFIX}{http.url}: it says that split {split!r} has {quoted(str(number))} tasks")
    return tuple(
        Example(id=f"{split}-{index}", question="", metadata={"split": split, "index": index})
        for index in range(number)
    )


def _action_maker(url: str, schema: Any, *, is_sorl: bool) -> ToAction:
    """How a text becomes an action of this schema: the value of its only field, or a JSON object."""
    if is_sorl:
        return lambda text: {"message": text}
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        raise UserError(f"{_PREFIX}{url}: /schema has no schema of an action: is this an OpenEnv server?")
    fields = {name: about for name, about in schema["properties"].items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    only = required[0] if len(required) == 1 else None
    kind = fields[only].get("type") if only is not None and isinstance(fields[only], dict) else None
    if only is not None and kind == "string":
        return lambda text: {only: text}
    plain = only is not None and kind in _PLAIN
    wanted = f"a JSON value of type {kind}" if plain else f"a JSON object with {', '.join(fields)}"

    def to_action(text: str) -> Mapping[str, Any]:
        try:
            value = read_json(text)
        except ValueError as error:
            raise ToolInputError(
                f"This action is not possible here: it must be {wanted}, but {error}"
            ) from error
        if plain and not isinstance(value, dict):
            return {str(only): value}
        if not isinstance(value, dict):
            raise ToolInputError(f"This action is not possible here: it must be {wanted}")
        return value

    return to_action


def _text_reader(field: str | None) -> Callable[[Mapping[str, Any]], str]:
    def to_text(observation: Mapping[str, Any]) -> str:
        shown = {name: value for name, value in observation.items() if name != "metadata"}
        if field is not None:
            value = shown.get(field)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(shown, ensure_ascii=False)

    return to_text


class _Http:
    """The questions that are asked once, before the first episode."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{_PREFIX}{url}: write {_PREFIX}http://HOST:PORT")
        self.url = url.rstrip("/")
        self.token = os.environ.get(TOKEN_VARIABLE)

    def get(self, path: str) -> Mapping[str, Any]:
        found = self._ask("GET", path)
        if not isinstance(found, dict):
            raise UserError(
                f"{_PREFIX}{self.url}: {path} is not what an OpenEnv server says; is the address right?"
            )
        return found

    def environment(self) -> str | None:
        """The name under which the server lists tasks."""
        names = self._ask("GET", "/list_environments", optional=True)
        if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
            return names[0]
        return None

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The answer, or None where the server has no such thing."""
        found = self._ask("POST", path, body, optional=True)
        return found if isinstance(found, dict) else None

    def _ask(self, method: str, path: str, body: Any = None, *, optional: bool = False) -> Any:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        where = f"{_PREFIX}{self.url}"
        content, deadline = bytearray(), time.monotonic() + 3 * _ASK_S
        try:
            with httpx.stream(
                method, self.url + path, json=body, headers=headers, timeout=_ASK_S
            ) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if time.monotonic() > deadline:
                        raise UserError(f"{where}: its answer to {path} takes longer than {3 * _ASK_S:g} s")
                    if len(content) > _MAX_BYTES:
                        raise UserError(f"{where}: its answer to {path} is longer than {_MAX_BYTES:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise UserError(f"{where} does not answer ({why}): start it, or correct the address") from error
        if response.status_code == 401:
            raise UserError(f"{where} wants a token: set the environment variable {TOKEN_VARIABLE}")
        if optional and response.status_code in (404, 405, 501):
            return None
        if response.status_code != 200:
            said = quoted(bytes(content[:500]).decode("utf-8", "replace"), 200)
            raise UserError(f"{where}: {path} answers {response.status_code}: {said}")
        try:
            return read_json(bytes(content))
        except ValueError as error:
            raise UserError(f"{where}: its answer to {path} cannot be read: {error}") from error

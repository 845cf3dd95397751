"""Record the replies of tools and replay them, so that a run can be repeated exactly without its servers."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.task import ToolSettings
from sorl_env.text import quoted, read_json
from sorl_env.tool import (
    MAX_REPLY_CHARS,
    Tool,
    ToolInputError,
    ToolLike,
    ToolReply,
    ToolResult,
    as_tool,
    keeps_state,
)
from sorl_env.tool_schema import takes_raw_text


@dataclass(frozen=True)
class _Row:
    """One line of the file: a request to a tool, and its reply or its refusal."""

    tool: str
    argument: Any
    text: str
    hits: int | None = None
    metadata: Mapping[str, Any] | None = None
    refused: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.tool, json.dumps(self.argument, sort_keys=True)

    def replay(self) -> ToolReply:
        if self.refused:
            raise ToolInputError(self.text)
        return ToolReply(self.text, self.hits, {**(self.metadata or {}), "cached": True})


class ReplayTool:
    """A tool whose replies are written to a JSONL file, read from one, or both.

    Replies and refusals (``ToolInputError``) are recorded. Outages are not, so a replay has none. If several rows have
    the same request, the first one is replayed.

    Args:
        record: file to which replies of the tool are appended; may be the one that is replayed.
        replay: file whose replies are served first. A request that is not in it goes to the tool if ``record`` is
            given, and raises LookupError otherwise.
        max_reply_chars: longer replies are cut before they are written.

    Raises:
        UserError: the file to replay is missing, or a row of it cannot be read; or the tool keeps state, so that equal
            requests may get different replies.
    """

    def __init__(
        self,
        tool: Tool,
        *,
        record: str | Path | None = None,
        replay: str | Path | None = None,
        max_reply_chars: int = MAX_REPLY_CHARS,
    ) -> None:
        if keeps_state(tool):
            raise UserError(
                f"tool {tool.name} keeps state between calls: equal requests may get different replies, which cannot "
                "be recorded or replayed: leave record and replay out"
            )
        self.tool = tool
        self.name = tool.name
        self.description = tool.description
        self.schema: Mapping[str, Any] = tool.schema
        self.inline = record is None or getattr(tool, "inline", False)
        self.is_sample = getattr(tool, "is_sample", False)
        self.max_reply_chars = max_reply_chars
        self.__signature__ = inspect.signature(tool)  # a toolbox checks arguments against it
        self._raw_text = takes_raw_text(tool.schema)
        self._record = None if record is None else Path(record)
        self._replay = None if replay is None else Path(replay)
        self._lock = threading.Lock()
        if self._record is not None and self._record.is_file():
            _end_last_line(self._record)
        self._rows: dict[tuple[str, str], _Row] = {}
        if self._replay is not None and (self._replay.exists() or self._replay != self._record):
            self._rows = _read(self._replay)
        self._known = set(self._rows)
        # A toolbox looks which ways of calling a tool has, so offer only those that the recorded tool offers.
        if hasattr(tool, "call_batch"):
            self.call_batch = self._call_batch
        if hasattr(tool, "acall"):
            self.acall = self._acall

    def __call__(self, *args: Any, **kwargs: Any) -> ToolResult:
        argument = args[0] if self._raw_text else kwargs
        row = self._find(argument)
        if row is not None:
            return row.replay()
        try:
            result = self.tool(*args, **kwargs)
        except ToolInputError as error:
            raise self._keep(argument, error) from error
        return self._keep(argument, result)

    async def _acall(self, *args: Any, **kwargs: Any) -> ToolResult:
        argument = args[0] if self._raw_text else kwargs
        row = self._find(argument)
        if row is not None:
            return row.replay()
        try:
            result = await self.tool.acall(*args, **kwargs)  # type: ignore[attr-defined]
        except ToolInputError as error:
            raise self._keep(argument, error) from error
        return self._keep(argument, result)

    def _call_batch(self, arguments: Sequence[Any]) -> list[ToolResult | Exception]:
        results: dict[int, ToolResult | Exception] = {}
        missing: list[int] = []
        for index, argument in enumerate(arguments):
            try:
                row = self._find(argument)
                if row is None:
                    missing.append(index)
                else:
                    results[index] = row.replay()
            except (ToolInputError, LookupError) as error:
                results[index] = error
        if missing:
            fresh = self.tool.call_batch([arguments[index] for index in missing])  # type: ignore[attr-defined]
            for index, result in zip(missing, fresh, strict=True):
                results[index] = self._keep(arguments[index], result)
        return [results[index] for index in range(len(arguments))]

    def close(self) -> None:
        close = getattr(self.tool, "close", None)
        if close is not None:
            close()

    def _find(self, argument: Any) -> _Row | None:
        row = self._rows.get(_Row(self.name, argument, "").key) if self._rows else None
        if row is None and self._record is None:
            asked = quoted(argument) if isinstance(argument, str) else repr(argument)[:200]
            raise LookupError(f"{self._replay} has no reply of {self.name} to {asked}; record it first")
        return row

    def _keep(self, argument: Any, result: Any) -> Any:
        """Write what a tool replied, and return it as it was written, so that a replay gives the same."""
        if isinstance(result, ToolInputError):
            text = ToolReply.received(str(result), self.max_reply_chars).text
            self._append(_Row(self.name, argument, text, refused=True))
            return ToolInputError(text)
        if isinstance(result, Exception):
            return result  # an outage in a batch
        reply = ToolReply.received(result, self.max_reply_chars)
        self._append(_Row(self.name, argument, reply.text, reply.hits, dict(reply.metadata)))
        return reply

    def _append(self, row: _Row) -> None:
        assert self._record is not None
        with self._lock:
            if row.key in self._known:
                return
            self._known.add(row.key)
            with self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def recorded(tools: Sequence[ToolLike], settings: ToolSettings, max_reply_chars: int) -> Sequence[ToolLike]:
    """The tools, wrapped in `ReplayTool` where the settings ask to record or replay."""
    record, replay = settings.record, settings.replay
    if record is None and replay is None:
        return tools
    return [
        ReplayTool(as_tool(tool), record=record, replay=replay, max_reply_chars=max_reply_chars)
        for tool in tools
    ]


def _end_last_line(path: Path) -> None:
    """Remove the half line that a stopped recorder left; otherwise the next row would be appended to it."""
    content = path.read_bytes()
    last = content[content.rfind(b"\n") + 1 :]
    try:
        if last and json.loads(last):
            path.write_bytes(content + b"\n")
    except ValueError:
        os.truncate(path, len(content) - len(last))


def _read(path: Path) -> dict[tuple[str, str], _Row]:
    if not path.is_file():
        raise UserError(f"{path}: no recorded tool replies there; record them with ToolSettings(record=...)")
    rows: dict[tuple[str, str], _Row] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _Row(**read_json(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a recorded tool reply ({error})") from error
        rows.setdefault(row.key, row)
    return rows

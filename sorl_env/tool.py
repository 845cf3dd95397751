"""Tools: what the policy may call, and the toolbox that calls them under a deadline.

A tool is a plain function with type hints and a docstring, or an object with ``name``, ``description``, ``schema`` and
``__call__``. Its tag is its name: the policy writes ``<search>query</search>``. A request the tool cannot serve is the
policy's fault and becomes an observation. An outage is not: it is retried, then raised.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sorl_env.text import valid_text
from sorl_env.tool_schema import check_schema, schema_of

logger = logging.getLogger(__name__)

MAX_REPLY_CHARS = 8000  # of a reply, where nobody says otherwise
RESERVED_NAMES = frozenset({"think", "answer", "information"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class ToolUnavailableError(RuntimeError):
    """A tool is out: timeouts, connection errors, 5xx, or a bug in the tool. Never the policy's fault.

    ``call`` is the record of the failed call when a toolbox raised it.
    """

    def __init__(self, message: str, call: ToolCall | None = None) -> None:
        super().__init__(message)
        self.call = call


class ToolInputError(ValueError):
    """The request is malformed: the policy's fault, shown to it as an observation."""


class ToolReply(NamedTuple):
    """What a tool says.

    Attributes:
        text: shown to the policy.
        hits: number of results, where that means something.
        metadata: JSON values; ``cached: True`` marks a reply that cost no call, ``cut_from: N`` one that had N
            characters before it was cut.
    """

    text: str
    hits: int | None = None
    metadata: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def received(cls, result: Any, max_chars: int) -> ToolReply:
        """The border where a tool's reply enters: what a tool returned, as valid text of at most ``max_chars``.

        Raises:
            TypeError: it is neither a text nor a reply, which is a bug of the tool.
        """
        reply = cls(result) if isinstance(result, str) else result
        if not isinstance(reply, cls) or not isinstance(reply.text, str):
            kind = type(result).__name__ + (
                f" with {type(reply.text).__name__}" if isinstance(reply, cls) else ""
            )
            raise TypeError(f"it returned {kind}, expected str or ToolReply")
        if len(reply.text) <= max_chars:
            return reply._replace(text=valid_text(reply.text))
        metadata = {"cut_from": len(reply.text), **reply.metadata}  # a record that is replayed was cut before
        return reply._replace(text=valid_text(reply.text[:max_chars]), metadata=metadata)


class ToolRequest(NamedTuple):
    """One block of the policy's: ``argument`` is the text between the tags."""

    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The record of one call.

    Attributes:
        reply: text for the policy; for ``ok=False`` it says what was wrong with the request.
        ok: False when the request was malformed or the tool was out.
        error: None, or what went wrong.
        latency_s: seconds, retries and waits included.
        attempts: how often the tool was tried.
        cached: the reply was replayed from a record.
        cut_from: characters that the tool's reply had before it was cut to ``Limits.max_reply_chars``; None: it is
            whole.
    """

    tool: str
    argument: str
    reply: str
    ok: bool = True
    error: str | None = None
    latency_s: float = 0.0
    hits: int | None = None
    attempts: int = 1
    cached: bool = False
    cut_from: int | None = None


ToolResult = str | ToolReply


@runtime_checkable
class Tool(Protocol):
    """A callable with a name and a typed schema.

    It is called with the block's text when its schema has one string parameter, else with keyword arguments from a JSON
    object. Optional members:

    - ``inline = True``: a fast in-process call, safe on the event loop. Others run in a thread, which is abandoned at
      the deadline.
    - ``acall``: the coroutine version of ``__call__``.
    - ``call_batch(arguments)``: takes a list of texts (or of mappings) and returns as many results; an exception
      instance in a slot fails that request alone.
    - ``is_sample = True``: it stands in for the real thing, as a search in a task's embedded sample does.
    - ``close()``: frees what the tool holds.
    - ``new_episode(seed)``, ``get_state()`` and ``set_state(state)``, all three: the tool keeps state. The environment
      calls ``new_episode`` at each reset and uses the tool that it returns for that episode alone; see
      docs/add_a_tool.md. A tool without them is shared by all episodes, also by those that run at the same time.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> ToolResult: ...


ToolLike = Tool | Callable[..., ToolResult]
ToolOutcome = ToolCall | ToolUnavailableError


@dataclass(frozen=True)
class _FunctionTool:
    """A plain function as a tool."""

    function: Callable[..., ToolResult]
    name: str
    description: str
    schema: Mapping[str, Any]
    inline: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> ToolResult:
        return self.function(*args, **kwargs)


_STATE_MEMBERS = ("new_episode", "get_state", "set_state")


def keeps_state(tool: object) -> bool:
    """Whether each episode needs an object of its own of this tool."""
    return hasattr(tool, "new_episode")


def begin_episode(tool: Tool, seed: int) -> Tool:
    """The object of a tool that keeps state for one episode.

    Raises:
        TypeError: ``new_episode`` returned the tool itself, or something else than a tool of its name.
    """
    made: Any = tool.new_episode(seed)  # type: ignore[attr-defined]
    if made is tool or getattr(made, "name", None) != tool.name or not keeps_state(made):
        raise TypeError(f"tool {tool.name}: new_episode must return another tool of that name, not {made!r}")
    episode_tool: Tool = made
    return episode_tool


def as_tool(tool: ToolLike) -> Tool:
    """A tool from a plain function (its name, docstring and type hints), or the tool itself.

    A function attribute ``inline = True`` is kept.

    Raises:
        TypeError: neither a function nor a tool, a parameter without a usable type hint, or one of the three members of
            a tool that keeps state without the others.
        ValueError: a name that cannot be a tag, or one that the turn format reserves; a schema that is none.
    """
    if inspect.iscoroutinefunction(tool):
        raise TypeError(
            f"tool {tool.__name__} is a coroutine: give an object with __call__ and acall instead"
        )
    if inspect.isroutine(tool):
        function: Callable[..., ToolResult] = tool
        made: Tool = _FunctionTool(
            function=function,
            name=function.__name__,
            description=inspect.getdoc(function) or "",
            schema=schema_of(function),
            inline=getattr(function, "inline", False),
        )
    elif isinstance(tool, Tool):
        made = tool
    else:
        raise TypeError(
            f"{tool!r} is no tool: give a function, or an object with name, description and schema"
        )
    missing = [name for name in _STATE_MEMBERS if not hasattr(made, name)]
    if keeps_state(made) and missing:
        raise TypeError(f"tool {made.name} has new_episode, so it needs {' and '.join(missing)} as well")
    check_schema(made.schema, f"tool {made.name}")
    if not _NAME.fullmatch(made.name) or made.name in RESERVED_NAMES:
        raise ValueError(
            f"a tool cannot be named {made.name!r}: its name is its tag, letters and digits, and "
            f"{', '.join(sorted(RESERVED_NAMES))} are taken"
        )
    return made

"""Tools that the policy may call, and the records of their calls.

A tool is a plain function with type hints and a docstring, or an object with ``name``, ``description``, ``schema`` and
``__call__``. Its name is its tag: the policy writes ``<search>query</search>``. A request that the tool cannot serve is
the policy's fault, and the refusal becomes an observation. An outage is not: it is retried, then raised.
"""

from __future__ import annotations

import inspect
import logging
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sorl_env.errors import UserError
from sorl_env.text import valid_text
from sorl_env.tool.schema import check_schema, schema_of

logger = logging.getLogger(__name__)

MAX_REPLY_CHARS = 8000  # the default limit on the length of a reply
RESERVED_NAMES = frozenset({"think", "answer", "information"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class ToolUnavailableError(RuntimeError):
    """A tool is unavailable: a time-out, a connection error, a 5xx, or a bug in the tool. Never the policy's fault.

    ``call`` is the record of the failed call, if a toolbox raised this.
    """

    def __init__(self, message: str, call: ToolCall | None = None) -> None:
        super().__init__(message)
        self.call = call


class ToolInputError(ValueError):
    """The policy's request is malformed. The message becomes its observation."""


class ToolReply(NamedTuple):
    """What a tool replies.

    Attributes:
        text: shown to the policy.
        hits: number of results, for tools that return results.
        cached: the reply needed no call.
        cut_from: the characters that the text had before it was cut.
    """

    text: str
    hits: int | None = None
    cached: bool = False
    cut_from: int | None = None

    @classmethod
    def received(cls, result: Any, max_chars: int) -> ToolReply:
        """Check what a tool returned, and make it valid text of at most ``max_chars``.

        Raises:
            TypeError: it is neither a text nor a reply, or its hits are no number, which is a bug of the tool.
        """
        reply = cls(result) if isinstance(result, str) else result
        if not isinstance(reply, cls) or not isinstance(reply.text, str):
            inside = f" with {type(reply.text).__name__}" if isinstance(reply, cls) else ""
            raise TypeError(f"it returned {type(result).__name__}{inside}, expected str or ToolReply")
        if type(reply.hits) not in (int, type(None)):  # a number of NumPy cannot be written as JSON
            try:
                reply = reply._replace(hits=operator.index(reply.hits))  # type: ignore[arg-type]
            except TypeError:
                raise TypeError(f"it returned hits={reply.hits!r}, which is not a whole number") from None
        if len(reply.text) > max_chars:
            reply = reply._replace(text=reply.text[:max_chars], cut_from=reply.cut_from or len(reply.text))
        text = valid_text(reply.text)
        return reply if text is reply.text else reply._replace(text=text)


class ToolRequest(NamedTuple):
    """A tool block that the policy wrote; ``argument`` is the text between its tags."""

    tool: str
    argument: str


class ToolCall(NamedTuple):
    """The record of one call.

    Attributes:
        reply: text for the policy; for ``ok=False`` it says what was wrong with the request.
        ok: False if the request was malformed or the tool was unavailable.
        error: what went wrong, or None.
        latency_s: seconds, with retries and the waits before them.
        attempts: how often the tool was tried.
        cached: the reply came from a cache.
        cut_from: characters of the tool's reply before it was cut to ``Limits.max_reply_chars``; None if it was not.
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

    It is called with the text of the block if its schema has a single string parameter, or else with keyword arguments
    from a JSON object. Optional members:

    - ``inline = True``: the call is fast and in this process, so it is safe on the event loop. Other tools run in a
      thread, which is abandoned at the deadline.
    - ``acall``: the coroutine version of ``__call__``.
    - ``is_sample = True``: it stands in for the real tool, such as a search in a task's embedded sample.
    - ``url = ".."``: the address of the server behind it, which the error of a call without a reply names.
    - ``close()``: frees what the tool holds.
    - ``new_episode(example, seed)``: the tool keeps state. The environment calls this at each reset and uses the
      returned tool for that episode alone; see docs/add_a_tool.md. A tool without it is shared by all episodes, which
      may run at the same time. Tools that share their state name the same object as their ``group``: its
      ``new_episode`` then returns the episode's tools by name, in one call.
    """

    @property
    def name(self) -> str:
        """The tag, or the name in a tool call."""

    @property
    def description(self) -> str:
        """What the policy is told that it does."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""

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


def keeps_state(tool: object) -> bool:
    """Whether each episode needs its own object of this tool."""
    return hasattr(tool, "new_episode")


def begin_episode(tool: Tool, example: Any, seed: int, groups: dict[int, Mapping[str, Tool]]) -> Tool:
    """The object of a stateful tool that serves one episode.

    Args:
        example: the ``Example`` that the episode is about.
        groups: what the ``new_episode`` of each tool's ``group`` returned in this episode, by the group's ``id``; the
            groups that are asked first are added to it.

    Raises:
        UserError: ``new_episode`` did not return another tool of the same name.
    """
    group: Any = getattr(tool, "group", None)
    if group is None:
        made: Any = tool.new_episode(example, seed)  # type: ignore[attr-defined]
    else:
        if id(group) not in groups:
            groups[id(group)] = group.new_episode(example, seed)
        made = groups[id(group)].get(tool.name)
    if made is tool or getattr(made, "name", None) != tool.name or not keeps_state(made):
        raise UserError(f"tool {tool.name}: new_episode must return another tool of that name, not {made!r}")
    episode_tool: Tool = made
    return episode_tool


def as_tool(tool: ToolLike) -> Tool:
    """Make a tool of a plain function, from its name, docstring and type hints. A tool is returned as it is.

    An attribute ``inline = True`` of the function is kept.

    Raises:
        TypeError: it is neither a function nor a tool, or a parameter has no usable type hint.
        ValueError: the name cannot be a tag or is reserved by the turn format, or the schema is not a schema.
    """
    if inspect.iscoroutinefunction(tool):
        raise TypeError(f"tool {tool.__name__} is a coroutine: give an object with __call__ and acall")
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
        raise TypeError(f"{tool!r} is not a tool: give a function or an object with name and schema")
    check_schema(made.schema, f"tool {made.name}")
    if not _NAME.fullmatch(made.name) or made.name in RESERVED_NAMES:
        raise ValueError(
            f"a tool cannot be named {made.name!r}: its name is its tag, made of letters and digits, and "
            f"{', '.join(sorted(RESERVED_NAMES))} are reserved"
        )
    return made

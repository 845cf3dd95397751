"""A task, declared as data: its examples, prompt, tools, reward and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import valid_text
from sorl_env.tool.tool import ToolLike
from sorl_env.turns.tags import ParsedTurn

# Several times as many as a token of running text has, so that cutting a reply never shortens the observation.
CHARS_A_TOKEN = 16


class ExampleError(UserError):
    """A field of an example has the wrong type: it has to be a text, or a list of texts."""


@dataclass(frozen=True)
class Example:
    """One question. Its texts are made valid Unicode here, whatever their source (see ``sorl_env.text``).

    Attributes:
        golden_answers: the accepted answers.
        options: letter -> text, for multiple choice.
        metadata: JSON values for the task's own use, never shown to the policy.

    Raises:
        ExampleError: a text is something else, or ``golden_answers`` is a single text.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        golds: object = self.golden_answers
        if isinstance(golds, str) or not isinstance(golds, Iterable):  # a text would be taken for its letters
            what = f"golden_answers is {golds!r}; give a tuple of texts, as ('Paris',)"
            raise ExampleError(f"example {self.id!r}: {what}")
        answers = tuple(self._text("golden_answers", one) for one in self.golden_answers)
        texts: dict[str, Any] = {name: self._text(name, getattr(self, name)) for name in ("id", "question")}
        if self.options is not None:
            given = dict(self.options)
            texts["options"] = {letter: self._text("options", text) for letter, text in given.items()}
        for name, value in {**texts, "golden_answers": answers}.items():
            object.__setattr__(self, name, value)

    def _text(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            return valid_text(value)
        kind = type(value).__name__
        raise ExampleError(f"example {self.id!r}: {name} holds {value!r} ({kind}); give a text, as str(..)")


@dataclass(frozen=True)
class Limits:
    """Budgets of one trajectory; the defaults are the paper's (Appendix, Implementation Details).

    Attributes:
        max_turns: turns of the policy. Four are three tool turns and one to answer: a tool block in the last turn is
            not executed.
        max_prompt_tokens: tokens of the first context.
        max_new_tokens: tokens of one turn.
        max_observation_tokens: tokens of one reply of the environment.
        max_trajectory_tokens: tokens of everything together.
        max_seconds: wall-clock time of an episode; None for no limit.
        max_reply_chars: characters of one tool's reply. A longer reply is cut before it is tokenized or stored, and its
            record says so (``ToolCall.cut_from``). None: 16 for each token of ``max_observation_tokens``.

    The environment enforces turns and seconds. The rollout, which handles tokens, enforces the rest.
    """

    max_turns: int = 4
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 500
    max_observation_tokens: int = 500
    max_trajectory_tokens: int = 4096
    max_seconds: float | None = None
    max_reply_chars: int | None = None

    @property
    def reply_chars(self) -> int:
        """``max_reply_chars``, or its default where it is None."""
        return self.max_reply_chars or CHARS_A_TOKEN * self.max_observation_tokens

    def __post_init__(self) -> None:
        names = ("max_turns", "max_prompt_tokens", "max_new_tokens", "max_observation_tokens")
        for name, low in {**dict.fromkeys(names, 1), "max_trajectory_tokens": 2}.items():
            if getattr(self, name) < low:
                raise ValueError(f"limits.{name} must be at least {low}, not {getattr(self, name)}")
        if self.max_reply_chars is not None and self.max_reply_chars < 1:
            raise ValueError(f"limits.max_reply_chars must be at least 1 or None, not {self.max_reply_chars}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"limits.max_seconds must be positive or None, not {self.max_seconds}")


@dataclass(frozen=True)
class ToolSettings:
    """What a task builds its tools from.

    Attributes:
        corpus: path of a corpus that is searched in this process.
        search_url: address of a retrieval server, or several separated by commas.
        cache: SQLite file that keeps the servers' replies for later processes; None keeps them in memory only.
        top_k: number of passages that a search returns.
        timeout_s, retries: see ``Toolbox``.
        tools: further tools beside the task's, named by texts such as ``mcp:URL`` (see ``open_tools``); the prompt ends
            with a description of them.
    """

    corpus: str | None = None
    search_url: str | None = None
    top_k: int = 3
    timeout_s: float = 30.0
    retries: int = 3
    cache: str | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class HubSource:
    """A Hugging Face data set; ``splits`` maps our names of splits to its own."""

    path: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)


# A text names tools that are opened with the environment, as ``mcp:URL`` does.
ToolSource = Sequence[ToolLike | str] | Callable[[ToolSettings], Sequence[ToolLike | str]]


@dataclass(frozen=True)
class Task:
    """What the author of a task declares. Commands take its name, ``package.module:TASK``, or the path of a file.

    Attributes:
        prompt: the first context, as plain text without a chat template.
        reward: the reward of an episode as named items, from its example and all of the policy's parsed turns. The
            reward is their sum. Called once, when the episode ends; it never sees the prompt or retrieved text.
        parse_row: makes an example of a row of the data set; raises KeyError or ValueError naming the column.
        tools: tools, plain functions, or texts that name tools (``mcp:URL``); or a function that builds them from
            settings.
        env_id: Gymnasium id, for example ``sorl/HotpotQA-v0``.
        embedded: maps a split to examples that are available offline.
        embedded_is_sample: the embedded examples are a sample and not the benchmark, which a warning says.
        hub: where the real data is on the Hugging Face hub.
        require_think: a turn must begin with a think block.
        turn_reward: named rewards of one turn, given at once; it reads all turns so far.
        wrong_answer: an answer that must score 0, for ``sorl-check-task``.
        expert: a scripted policy for demonstrations: maps the example and the observations so far to the next turn, or
            to None where it gives up; such an example has no demonstration.
        tool_call_prompt: the first context in format ``tool_calls``, which does not speak of tags; None: ``prompt``.
        vocabulary: texts with every word that can occur in the task, for a word-level tokenizer.
        environment: builds the environment from the task, its examples and the limits, where the episodes are not
            ``ToolUseEnv``'s dialogues with tools; see ``TextEnv``. ``prompt`` and ``reward`` are then not used.

    Raises:
        UserError: a field is of another kind.
    """

    name: str
    prompt: Callable[[Example], str]
    reward: Callable[[Example, Sequence[ParsedTurn]], Mapping[str, float]]
    parse_row: Callable[[Mapping[str, Any]], Example]
    tools: ToolSource = ()
    env_id: str | None = None
    embedded: Callable[[str], Sequence[Example]] | None = None
    embedded_is_sample: bool = False
    hub: HubSource | None = None
    limits: Limits = Limits()
    require_think: bool = True
    turn_reward: Callable[[Example, Sequence[ParsedTurn]], Mapping[str, float]] | None = None
    wrong_answer: Callable[[Example], str] | None = None
    expert: Callable[[Example, Sequence[str]], str | None] | None = None
    vocabulary: Callable[[], Iterable[str]] | None = None
    system_prompt: str | None = None
    tool_call_prompt: Callable[[Example], str] | None = None
    description: str = ""
    environment: Callable[[Task, Any, Limits], Any] | None = None

    def __post_init__(self) -> None:
        functions = ("turn_reward", "wrong_answer", "expert", "vocabulary", "embedded", "tool_call_prompt")
        given = [name for name in functions if getattr(self, name) is not None]
        kinds = [
            ("name", isinstance(self.name, str) and bool(self.name), "a text"),
            ("limits", isinstance(self.limits, Limits), "Limits(..)"),
            ("tools", isinstance(self.tools, (list, tuple)) or callable(self.tools), "a list, as [search]"),
        ]
        named = ("prompt", "reward", "parse_row", *given)
        kinds += [(name, callable(getattr(self, name)), "a function") for name in named]
        for name, fits, what in kinds:
            if not fits:
                raise UserError(f"task {self.name!r}: {name}={getattr(self, name)!r}; give {what}")

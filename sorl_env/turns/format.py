"""The two turn formats as text: how a prompt asks, how a turn is read, and how a reply of the environment reads.

``tags``: blocks such as ``<search>..</search>`` in one long assistant message, as in Search-R1 and the paper.
``tool_calls``: the tool calls of the model's own chat template. The tokens of both are in ``tokens`` and
``turns.chat_codec``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from sorl_env.errors import UserError, did_you_mean
from sorl_env.tool.toolbox import Toolbox
from sorl_env.turns.tags import ParsedTurn, neutralise, parse_turn
from sorl_env.turns.tool_calls import Syntax, parse_message

FormatName = Literal["tags", "tool_calls"]
FORMATS: tuple[str, ...] = get_args(FormatName)

INVALID_TURN = (
    "\n\n<information>\nInvalid turn: write one think block, then exactly one tool or answer block, and nothing else.\n"
    "</information>\n\n"
)
INVALID_MESSAGE = (
    "Invalid message: call exactly one tool and write nothing after it, or reply with the final answer alone."
)
_CONTROL = re.compile(r"\[(?=/?[A-Z][A-Z_]{0,30}\])")  # Mistral's markers, such as [TOOL_CALLS]


@dataclass(frozen=True)
class TagFormat:
    """``<think>..</think>``, then the block of a tool or ``<answer>``; see ``turns.tags``.

    Attributes:
        invalid_observation: the reply to a malformed turn.
    """

    name: str = "tags"
    invalid_observation: str = INVALID_TURN

    def parse(self, text: str, toolbox: Toolbox, require_think: bool) -> ParsedTurn:
        """What a turn of the policy means; a malformed one is returned as such, nothing raises."""
        return parse_turn(text, toolbox.names, require_think)

    def observation(self, reply: str) -> str:
        """A tool's reply as the policy reads it."""
        return f"\n\n<information>\n{neutralise(reply)}\n</information>\n\n"


@dataclass(frozen=True)
class ToolCallFormat:
    """Messages of a chat template; see ``turns.tool_calls``. A think block is never required.

    Attributes:
        syntax: of the policy's template, which the rollout knows; None reads a call in any of the known forms.
    """

    syntax: Syntax | None = None
    name: str = "tool_calls"
    invalid_observation: str = INVALID_MESSAGE

    def parse(self, text: str, toolbox: Toolbox, require_think: bool) -> ParsedTurn:
        """As ``TagFormat.parse``, for a message of the template."""
        return parse_message(text, toolbox.tools, self.syntax)

    def observation(self, reply: str) -> str:
        """A tool's reply as the policy reads it, without markers of a template."""
        return neutralise_controls(reply)


def neutralise_controls(text: str) -> str:
    """As ``neutralise``, and for the markers of Mistral's templates as well.

    >>> neutralise_controls("[TOOL_CALLS] <tool_call> [1]")
    '&#91;TOOL_CALLS] &lt;tool_call> [1]'
    """
    return _CONTROL.sub("&#91;", neutralise(text)) if "[" in text else neutralise(text)


TurnFormat = TagFormat | ToolCallFormat
TAGS = TagFormat()


def find_format(name: str) -> TurnFormat:
    """The format of that name.

    Raises:
        UserError: there is none.
    """
    if name not in FORMATS:
        raise UserError(f"there is no turn format {name!r}. {did_you_mean(name, FORMATS)}")
    return TAGS if name == "tags" else ToolCallFormat()

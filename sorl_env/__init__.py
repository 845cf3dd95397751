"""Gymnasium environments for language-model agents that use tools over several turns.

``import sorl_env`` registers the environment ids and loads nothing heavy.
"""

from sorl_env.data import ExampleSet, load_examples
from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.parser import FormatError, ParsedTurn, neutralise, parse_turn
from sorl_env.registry import load_task, make, register_envs, register_task, task_names
from sorl_env.step import StepResult, TurnInfo, UnicodeText
from sorl_env.task import Example, HubSource, Limits, Task, ToolSettings
from sorl_env.text_env import TextEnv, open_env
from sorl_env.tool import (
    Tool,
    ToolCall,
    ToolInputError,
    ToolReply,
    ToolRequest,
    ToolUnavailableError,
    as_tool,
)
from sorl_env.toolbox import Toolbox
from sorl_env.trajectory import StopReason, Trajectory, Turn

__all__ = [
    "Example",
    "ExampleSet",
    "FormatError",
    "HubSource",
    "Limits",
    "ParsedTurn",
    "StepResult",
    "StopReason",
    "Task",
    "TextEnv",
    "Tool",
    "ToolCall",
    "ToolInputError",
    "ToolReply",
    "ToolRequest",
    "ToolSettings",
    "ToolUnavailableError",
    "ToolUseEnv",
    "Toolbox",
    "Trajectory",
    "Turn",
    "TurnInfo",
    "UnicodeText",
    "UserError",
    "as_tool",
    "load_examples",
    "load_task",
    "make",
    "neutralise",
    "open_env",
    "parse_turn",
    "register_envs",
    "register_task",
    "task_names",
]

register_envs()

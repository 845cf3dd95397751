"""Gymnasium environments for language-model agents that use tools over several turns.

``import sorl_env`` registers the environment ids and loads nothing heavy.
"""

from sorl_env.envs.step import StepResult, TurnInfo, UnicodeText
from sorl_env.envs.text_env import TextEnv, open_env
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task.data import ExampleSet, load_examples
from sorl_env.task.registry import load_task, make, register_envs, register_task, task_names
from sorl_env.task.task import Example, HubSource, Limits, Task, ToolSettings
from sorl_env.tool.tool import (
    Tool,
    ToolCall,
    ToolInputError,
    ToolReply,
    ToolRequest,
    ToolUnavailableError,
    as_tool,
)
from sorl_env.tool.toolbox import Toolbox
from sorl_env.trajectory.trajectory import StopReason, Trajectory, Turn
from sorl_env.turns.tags import FormatError, ParsedTurn, neutralise, parse_turn

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

"""Tasks, the examples they are about, and how both are found."""

from sorl_env.task.task import (
    CHARS_A_TOKEN,
    Example,
    ExampleError,
    HubSource,
    Limits,
    Task,
    ToolSettings,
    ToolSource,
)

__all__ = [
    "CHARS_A_TOKEN",
    "Example",
    "ExampleError",
    "HubSource",
    "Limits",
    "Task",
    "ToolSettings",
    "ToolSource",
]

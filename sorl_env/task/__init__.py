"""Tasks, the examples they are about, and how both are found."""

from sorl_env.task.task import Example, HubSource, Limits, Task, ToolSettings

__all__ = ["Example", "HubSource", "Limits", "Task", "ToolSettings"]

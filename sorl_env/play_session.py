"""``sorl-play`` on an environment from elsewhere: a line that is typed is an action."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sorl_env.errors import UserError
from sorl_env.session_env import ACTION, SessionEnv
from sorl_env.step import StepResult
from sorl_env.text import quoted
from sorl_env.tool import ToolUnavailableError


async def play_session(
    env: SessionEnv, index: int, seed: int, read: Callable[[], str | None], show: Callable[[str], None]
) -> StepResult | None:
    """Play the episode of example ``index``; returns its last step, or None if the player left.

    Args:
        read: the next line, or None to leave.

    Raises:
        UserError: no episode can begin.
    """
    try:
        show(await env.areset(index, seed))
        while True:
            line = await asyncio.to_thread(read)
            if line is None:
                return None
            if env.format == "action" and not line.startswith("<"):
                line = f"<{ACTION}>{line}</{ACTION}>"
            result = await env.astep(line)
            show(result.observation.strip() or f"[no reply to {quoted(line)}]")
            if result.terminated or result.truncated:
                return result
    except ToolUnavailableError as error:
        raise UserError(str(error)) from error
    finally:
        env.end_episode()

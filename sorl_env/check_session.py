"""``sorl-check-task`` on an environment from elsewhere: does it answer, and does its seed decide how it begins?"""

from __future__ import annotations

from sorl_env.check import Check
from sorl_env.interrupts import run_async
from sorl_env.session_env import ACTION, SessionEnv
from sorl_env.tokens import Tokenizer, encode_prompt
from sorl_env.tool import ToolUnavailableError

_SEED = 0


def check_session(env: SessionEnv, *, limit: int = 200, tokenizer: Tokenizer | None = None) -> list[Check]:
    """Check an environment on its first ``limit`` episodes, whose first texts are read; one of them plays a turn.

    Args:
        tokenizer: as for ``check_task``.
    """
    return run_async(_check(env, limit, tokenizer))


async def _check(env: SessionEnv, limit: int, tokenizer: Tokenizer | None) -> list[Check]:
    count = min(limit, len(env.examples))
    prompts: list[str] = []
    try:
        for index in range(count):
            prompts.append(await env.areset(index, _SEED))
            env.end_episode()
        again = await env.areset(0, _SEED)
        turn = await env.astep(f"<{ACTION}>look</{ACTION}>" if env.format == "action" else "look")
    except ToolUnavailableError as error:
        return [Check("episodes", False, str(error))]
    finally:
        env.end_episode()
    said = "the first episode begins in the same way again"
    differs = (
        "the first episode began in two different ways: the rollouts of a group would have different prompts; let the "
        "environment follow its seed, or use an algorithm with a critic"
    )
    problem = turn.info.get("error")
    return [
        Check("episodes", True, f"{count} begin"),
        _check_sizes(env, prompts, tokenizer),
        Check("seeds", again == prompts[0], said if again == prompts[0] else differs),
        Check("turn", problem is None, problem or f"a reply of {len(turn.observation)} characters"),
    ]


def _check_sizes(env: SessionEnv, prompts: list[str], tokenizer: Tokenizer | None) -> Check:
    if tokenizer is None:
        sizes = [len(f"{env.task.system_prompt or ''} {prompt}".split()) for prompt in prompts]
        unit = "words; count tokens with --tokenizer FOLDER"
    else:
        sizes = [len(encode_prompt(tokenizer, prompt, env.task.system_prompt)) for prompt in prompts]
        unit = "tokens"
    limit = env.limits.max_prompt_tokens
    return Check("prompts", max(sizes) <= limit, f"longest {max(sizes)} (limit {limit}; {unit})")

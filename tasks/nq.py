"""Natural Questions: questions that people asked a search engine, with short answers.

A row has the columns ``question`` and ``golden_answers``.
"""

from __future__ import annotations

from sorl_env.task import HubSource, Task
from sorl_tasks._qa import parse_qa_row, qa_prompt, qa_reward, qa_tool_call_prompt, sample, search_tools
from sorl_tasks._qa_expert import hasty_expert


def nq(*, hasty: float = 0.0) -> Task:
    """Build the task.

    Args:
        hasty: on this share of the questions, the expert answers without a search, see `hasty_expert`.

    Raises:
        UserError: ``hasty`` is not a share.
    """
    return Task(
        name="nq",
        description="Natural Questions (open domain): search, then a short answer, scored by exact match.",
        env_id="sorl/NQ-v0",
        prompt=qa_prompt,
        tool_call_prompt=qa_tool_call_prompt,
        reward=qa_reward,
        parse_row=parse_qa_row,
        tools=search_tools("nq"),
        embedded=sample("nq", parse_qa_row),
        embedded_is_sample=True,
        expert=hasty_expert(hasty),
        hub=HubSource("RUC-NLPIR/FlashRAG_datasets", "nq"),  # Search-R1's source
    )


TASK = nq()

"""HotpotQA: questions that need two passages, and so two searches.

A row has the columns ``question`` and ``golden_answers`` (or ``answer``).
"""

from __future__ import annotations

from sorl_env.task import HubSource, Task
from sorl_tasks._qa import parse_qa_row, qa_prompt, qa_reward, qa_tool_call_prompt, sample, search_tools
from sorl_tasks._qa_expert import hasty_expert


def hotpotqa(*, hasty: float = 0.0) -> Task:
    """Build the task.

    Args:
        hasty: on this share of the questions, the expert answers without a search, see `hasty_expert`.

    Raises:
        UserError: ``hasty`` is not a share.
    """
    return Task(
        name="hotpotqa",
        description="HotpotQA: two-hop questions over Wikipedia, scored by exact match.",
        env_id="sorl/HotpotQA-v0",
        prompt=qa_prompt,
        tool_call_prompt=qa_tool_call_prompt,
        reward=qa_reward,
        parse_row=parse_qa_row,
        tools=search_tools("hotpotqa"),
        embedded=sample("hotpotqa", parse_qa_row),
        embedded_is_sample=True,
        expert=hasty_expert(hasty),
        # Search-R1's source. The answers of the test split were never published, so everyone evaluates on dev.
        hub=HubSource("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", {"test": "dev"}),
    )


TASK = hotpotqa()

"""HotpotQA: questions that need two passages, and so two searches.

A row has the columns ``question`` and ``golden_answers`` (or ``answer``).
"""

from __future__ import annotations

from sorl_env.task import HubSource, Task
from sorl_tasks._qa_expert import searched_task


def hotpotqa(*, hasty: float = 0.0) -> Task:
    """Build the task; on the share ``hasty`` of the questions its expert answers without a search."""
    return searched_task(
        "hotpotqa",
        "sorl/HotpotQA-v0",
        "HotpotQA: two-hop questions over Wikipedia, scored by exact match.",
        # Search-R1's source. The answers of the test split were never published, so everyone evaluates on dev.
        HubSource("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", {"test": "dev"}),
        hasty,
    )


TASK = hotpotqa()

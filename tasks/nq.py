"""Natural Questions: questions that people asked a search engine, with short answers.

A row has the columns ``question`` and ``golden_answers``.
"""

from __future__ import annotations

from sorl_env.task import HubSource, Task
from sorl_tasks._qa_expert import searched_task


def nq(*, hasty: float = 0.0) -> Task:
    """Build the task; on the share ``hasty`` of the questions its expert answers without a search."""
    return searched_task(
        "nq",
        "sorl/NQ-v0",
        "Natural Questions (open domain): search, then a short answer, scored by exact match.",
        HubSource("RUC-NLPIR/FlashRAG_datasets", "nq"),  # Search-R1's source
        hasty,
    )


TASK = nq()

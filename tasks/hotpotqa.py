"""HotpotQA: questions that take two passages, and so two searches.

Real questions: ``data="hf:"``, or a file with the columns ``question`` and ``golden_answers`` (or ``answer``); real
passages: ``corpus=`` or ``search_url=``. Without them, 28 questions written for this project in the same schema.
"""

from __future__ import annotations

from sorl_env.task import HubSource, Task
from sorl_tasks._qa import parse_qa_row, qa_prompt, qa_reward, sample, search_tools

TASK = Task(
    name="hotpotqa",
    description="HotpotQA: two-hop questions over Wikipedia, scored by exact match.",
    env_id="sorl/HotpotQA-v0",
    prompt=qa_prompt,
    reward=qa_reward,
    parse_row=parse_qa_row,
    tools=search_tools("hotpotqa"),
    embedded=sample("hotpotqa", parse_qa_row),
    embedded_is_sample=True,
    # where Search-R1 takes it from; the test answers were never published, so the field evaluates on dev
    hub=HubSource("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", {"test": "dev"}),
)

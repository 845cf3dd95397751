"""MedQA: questions in the style of the US medical licensing examination, four options.

In-domain in the paper's Table 1. Real questions come from ``data="hf:"``, or from a file with ``question``, ``options``
({"A": ..}) and ``answer_idx``; real passages from ``corpus=`` or ``search_url=``. Without these, the task has a sample
written for this project.
"""

from __future__ import annotations

from sorl_env.task import HubSource
from sorl_tasks._medical import choice_task

TASK = choice_task(
    "medqa",
    "sorl/MedQA-v0",
    "MedQA (US, four options): medical multiple choice, in-domain.",
    hub=HubSource("GBaker/MedQA-USMLE-4-options"),
)

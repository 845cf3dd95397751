"""MedQA: questions in the style of the US medical licensing examination, four options. In-domain in the paper's Table
1.

A row has ``question``, ``options`` ({"A": ..}) and ``answer_idx``.
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

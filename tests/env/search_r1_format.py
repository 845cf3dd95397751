"""Search-R1's format reward: an independent judgement of whole rollouts, to hold ours against."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ASSISTANT = re.compile(r"<\|im_start\|>assistant\s*")
_BLOCKS = ("think", "search", "information", "answer")
_TAG = re.compile(rf"</?(?:{'|'.join(_BLOCKS)})>")
# state -> tag -> next state; only blocks may hold text other than white space
_MOVES: Mapping[str, Mapping[str, str]] = {
    "start": {"<think>": "in_think"},
    "in_think": {"</think>": "after_think"},
    "after_think": {"<search>": "in_search", "<answer>": "in_answer"},
    "in_search": {"</search>": "after_search"},
    "after_search": {"<information>": "in_information"},
    "in_information": {"</information>": "start"},
    "in_answer": {"</answer>": "end"},
    "end": {},
}


def search_r1_valid_format(rollout_text: str) -> bool:
    """Judge a whole rollout the way Search-R1's format reward does.

    Everything after the first ``<|im_start|>assistant`` must read: think, search, information, any number of times,
    then think, answer, and nothing more. Retrieved text counts too: a tag in it breaks the sequence.
    """
    marker = _ASSISTANT.search(rollout_text)
    if marker is None:
        return False
    state, position = "start", marker.end()
    for tag in _TAG.finditer(rollout_text, position):
        if not state.startswith("in_") and rollout_text[position : tag.start()].strip():
            return False
        next_state = _MOVES[state].get(tag[0])
        if next_state is None:
            return False
        state, position = next_state, tag.end()
    return state == "end" and not rollout_text[position:].strip()

"""Demonstrations from a file: a row of another form is refused, and the message names its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.models.policy import load_tokenizer
from sorl_train.sft.fine_tune import file_demos

ASKED = {"role": "user", "content": "who?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "search"}}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [ASKED, CALL]}, "must be a text; tool_calls are not read"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"text": "x"}]}]}, "must be a text"),
        ({"messages": ["who?", "me"]}, "not a demonstration"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "'content'"),
        ({"prompt": "who?", "turns": [{"text": "me"}]}, "'observation'"),
        ({"prompt": "who?", "turns": "me"}, "not a demonstration"),
        ({"prompt": "who?", "turns": []}, "no turn to imitate"),
        ({"question": "who?"}, r"this row has \['question'\]"),
    ],
)
def test_a_row_of_another_form_is_named_with_its_line(
    row: dict[str, Any], said: str, tiny_folder: str, tmp_path: Path
) -> None:
    rows = [{"messages": [ASKED, {"role": "assistant", "content": "me"}]}, row]
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    with pytest.raises(UserError, match=rf"demos\.jsonl:2: .*{said}"):
        file_demos(str(path), load_tokenizer(tiny_folder), 1000, use_chat_template=False)

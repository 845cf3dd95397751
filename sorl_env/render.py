"""Show dialogues in a terminal, laid out as in the paper's Table 2."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from sorl_env.task import Example

_BLUE, _CYAN, _GRAY, _RED, _BOLD, _RESET = (f"\033[{code}m" for code in (34, 36, 90, 31, 1, 0))
_RULE = "-" * 80


def render_dialogue(example: Example, dialogue: Iterable[tuple[str, str]], tools: Collection[str]) -> str:
    """The question, the options, then each turn with the environment's reply, with tags in the table's colours.

    Args:
        dialogue: pairs of a turn of the policy and the observation after it, which is empty after the last turn.
    """
    lines = [_RULE, f"{_BOLD}Question:{_RESET} {example.question}"]
    if example.options:
        lines += [
            "",
            f"{_BOLD}Options:{_RESET}",
            *(f"{letter}: {text}" for letter, text in example.options.items()),
        ]
    lines.append(_RULE)
    colours = {"think": _BLUE, "information": _GRAY, "answer": _RED, **dict.fromkeys(tools, _CYAN)}
    tag = re.compile(rf"</?({'|'.join(map(re.escape, colours))})>")
    for action, observation in dialogue:
        for text in filter(None, (action.strip(), observation.strip())):
            text = text.replace("\033", "\N{SYMBOL FOR ESCAPE}")  # a policy must not control it
            lines += [tag.sub(lambda match: f"{colours[match[1]]}{match[0]}{_RESET}", text), ""]
        lines[-1] = _RULE
    return "\n".join(lines)

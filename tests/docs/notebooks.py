"""Executes the notebooks of docs/tutorials and writes their outputs.

python tests/docs/notebooks.py NAME ..      # executes these notebooks anew, and keeps what they print

A notebook is a JSON file and its cells are Python, so they run here one after the other in one namespace. A kernel
(nbclient, ipykernel) would bring thirty packages for the same. Only what such a cell can show is read: what it prints,
and the value of its last line, as HTML if it has ``_repr_html_``. Magics such as ``!pip`` are refused by Python itself.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


def execute(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a new execution; an exception of a cell goes to the caller."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = run_cell("".join(cell["source"]), names, number)
    return notebook


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What the cell prints, and the value of its last line."""
    tree = ast.parse(source, f"cell {number}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append(
            {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def main(given: list[str]) -> None:
    for name in given:
        path = TUTORIALS / name
        path.write_text(json.dumps(execute(path), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

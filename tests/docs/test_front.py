"""The files that GitHub and coding agents read by their names."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .blocks import REPOSITORY


def read(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    version = re.search(r'^version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    cited = read("CITATION.cff")
    assert version is not None and cited["version"] == version[1]
    assert len(cited["preferred-citation"]["authors"]) == 10
    assert "2511.20718" in cited["preferred-citation"]["journal"]


def test_a_skill_is_named_as_its_folder() -> None:
    """By the Agent Skills form: small letters, digits and dashes; a description of at most 1,024 letters."""
    for file in REPOSITORY.glob("skills/*/SKILL.md"):
        header = yaml.safe_load(file.read_text(encoding="utf-8").split("---\n")[1])
        assert header["name"] == file.parent.name and re.fullmatch(r"[a-z0-9-]{1,64}", header["name"])
        assert 0 < len(header["description"]) <= 1024


def test_issue_forms_have_what_github_asks_for() -> None:
    for name in ("bug", "question_or_feature"):
        form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form["name"] and form["description"]
        for field in form["body"]:
            assert field["type"] in {"textarea", "dropdown", "input", "checkboxes", "markdown"}
            assert field["attributes"]["label"]
        assert len({field["id"] for field in form["body"]}) == len(form["body"])

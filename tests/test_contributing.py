"""What is shown as a model is what stands in the files that it is said to be from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("CONTRIBUTING.md", "SECURITY.md")
MODELS = re.findall(
    r"From\s`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", (ROOT / PAPERS[0]).read_text("utf-8"), re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize(("path", "model"), MODELS, ids=[path for path, _ in MODELS])
def test_a_model_stands_where_it_is_said_to(path: str, model: str) -> None:
    assert model in (ROOT / path).read_text("utf-8")


def test_there_is_a_model_of_a_docstring_a_test_and_a_line_of_the_changelog() -> None:
    assert [path for path, _ in MODELS] == ["pglease/handles.py", "pglease/testing/contract.py", "CHANGELOG.md"]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_file_that_is_named_exists(paper: str) -> None:
    text = (ROOT / paper).read_text("utf-8")
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    named = re.findall(r"`((?:pglease|tests)/[\w/.]+)`", text)

    assert [target for target in [*linked, *named] if not (ROOT / target).exists()] == []

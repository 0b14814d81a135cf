"""The catalogue of errors knows every error, every reason and every fact, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from pglease import errors
from pglease.errors import PgleaseError
from pglease.records import LossReason

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "errors.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, PgleaseError) and kind.__name__ == name
}


def facts(kind: type[PgleaseError]) -> set[str]:
    """Return the attributes that this kind adds to what it is a kind of."""
    here, above = (vars(each("words")).keys() for each in (kind, kind.__bases__[0]))
    declared = {name for name in vars(kind).get("__annotations__", ()) if not name.startswith("_")}
    return {*(here - above), *declared}


def test_every_error_has_its_section_and_every_section_its_error() -> None:
    assert list(SECTIONS) == list(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_section_says_what_happened_how_things_stand_and_what_to_do(name: str) -> None:
    heads = re.findall(r"^\*\*(.+?)\.\*\*", SECTIONS[name], re.MULTILINE)

    assert heads == ["What happened", "Afterwards", "What to do"]
    assert [fact for fact in facts(KINDS[name]) - {"refused"} if f"`{fact}`" not in SECTIONS[name]] == []


@pytest.mark.parametrize("name", [name for name in KINDS if name != "PgleaseError"])
def test_each_error_says_itself_how_things_stand_afterwards(name: str) -> None:
    assert "Afterwards: " in (KINDS[name].__doc__ or "")


def test_the_family_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"^\| [^`]*`(\w+)`", PAGE.partition("## ")[0], re.MULTILINE)

    assert set(drawn) == set(KINDS)
    assert len(drawn) == len(set(drawn))


def test_every_reason_for_a_loss_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", SECTIONS["LeaseLostError"], re.MULTILINE)

    assert explained == list(get_args(LossReason))

"""The benchmarks run, at the smallest size; what they measure is looked at by people, on a quiet machine."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET

import pytest

from benchmarks.__main__ import SECTIONS, kept, report
from benchmarks.draw import drawn
from benchmarks.figures import Aim, Figure, Section, Spread, from_json, to_json
from benchmarks.timing import EFFORTS

CHEAP = ("in_memory", "on_kubernetes", "on_sqlite")
"""Those that start no server."""


def figure(ours: float, aim: Aim) -> Figure:
    return Figure("work", "µs", Spread(ours, ours, ours), Spread(10, 9, 11), "another", aim)


@pytest.mark.parametrize("name", CHEAP)
def test_a_section_measures_something(name: str) -> None:
    section: Section = importlib.import_module(f"benchmarks.{name}").section(EFFORTS["smoke"])

    assert section.figures
    assert all(figure.ours.median >= 0 for figure in section.figures)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in {*CHEAP, "beside"}])
def test_the_sections_that_start_servers_measure_something(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").section(EFFORTS["smoke"]).figures


def test_every_section_is_there() -> None:
    assert all(callable(importlib.import_module(f"benchmarks.{name}").section) for name in SECTIONS)


def test_an_aim_is_judged_by_the_ratio_or_by_our_own_figure() -> None:
    assert figure(11, Aim(1.1)).kept
    assert not figure(12, Aim(1.1)).kept
    assert figure(9, Aim(0.85, at_least=True)).kept
    assert not figure(8, Aim(0.85, at_least=True)).kept
    assert not figure(11, Aim(3, "ours")).kept


def test_what_is_kept_comes_back_and_says_which_targets_were_not_met() -> None:
    section = Section("Work", "By hand.", [figure(12, Aim(1.1)), figure(10, Aim(1.1))], ["a note"], ["a peer"])
    text = to_json(section, machine="a machine", date="2026-01-01", seconds=1, effort="smoke")

    back, facts = from_json(text)

    assert back == section
    said = report({"on_postgres": (back, facts)})
    assert "1 of 2 are met" in said
    assert "Not measured: a peer" in said


def test_a_picture_is_well_formed_and_has_a_bar_for_each_ratio() -> None:
    picture = ET.fromstring(drawn("<&>", [figure(12, Aim(1.1)), figure(5, Aim(2))], about="both"))

    assert len(picture.findall("{*}rect")) == 3  # the ground, and the bars


def test_the_results_that_are_kept_can_be_read() -> None:
    assert kept()

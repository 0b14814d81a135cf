"""Whether it can be read: in light and in dark, by every eye, on every width, and without a script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pglease.web
from tests.support.colours import contrast

CSS = (Path(pglease.web.__file__).parent / "static" / "web.css").read_text()


def palettes() -> list[dict[str, str]]:
    found = re.findall(r"--([\w-]+): (#[0-9a-f]{6})", CSS)
    half = len(found) // 2
    return [dict(found[:half]), dict(found[half:])]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_its_ground_in_light_and_in_dark(mode):
    colours = palettes()[mode]

    assert contrast(colours["ink"], colours["paper"]) >= 7
    for text in ("ink", "faint", "link", "good", "warn", "danger"):
        assert contrast(colours[text], colours["paper"]) >= 4.5, text
    for text, ground in (("ink", "shade"), ("danger", "shade"), ("faint", "shade"), ("ink", "warn-paper")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert colours.keys() == palettes()[0].keys()


def test_each_state_has_a_mark_beside_its_colour():
    marks = re.findall(r"\.(?:state|late|ran-out|free)::before \{ content: \"(.) \"", CSS)

    assert len(marks) == len(set(marks)) == 4


def test_every_class_that_is_styled_is_used_and_the_other_way_round(operator, worker):
    pages = "".join(path.read_text() for path in (Path(pglease.web.__file__).parent / "templates").iterdir())

    styled = set(re.findall(r"\.([a-z][\w-]*)(?=[^{}]*\{)", re.sub(r"[\d.]+rem", "", CSS)))
    used = {word for value in re.findall(r'class="([^"]*)"', pages) for word in re.sub(r"{{.*?}}", "", value).split()}
    states = {"held", "late", "ran-out", "free"}

    assert styled == used | states


def test_every_field_has_a_label_and_every_page_one_heading_a_title_and_a_way_past_its_head(operator, worker):
    worker.try_acquire("job", ttl="10m")

    for address in ("/", "/lease?name=job"):
        page = operator.get(address).text
        fields = re.findall(r'<(?:input|select) id="(\w+)"', page)
        assert set(fields) == set(re.findall(r'<label for="(\w+)"', page))
        assert page.count("<h1") == 1
        assert re.search(r"<title>[^<]+ · pglease</title>", page)
        assert '<a class="skip" href="#main">' in page
        assert '<html lang="en">' in page
        assert 'content="width=device-width, initial-scale=1"' in page

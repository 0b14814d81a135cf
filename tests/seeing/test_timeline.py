"""The picture: a row for each lease, a bar for each hold, for every eye and for none."""

from __future__ import annotations

import itertools
import random
import re
from datetime import UTC, datetime, timedelta
from typing import get_args
from xml.etree import ElementTree as ET

import pytest

from pglease import Tenure
from pglease.records import Ending
from pglease.testing.histories import Fault, History, Look, Op, Told
from pglease.timeline import _COLOURS, WIDTH, WORDS, svg
from tests.jepsen.picture import picture
from tests.support.colours import contrast

BEGAN = datetime(2026, 11, 30, 4, 0, tzinfo=UTC)
SVG = "{http://www.w3.org/2000/svg}"


def tenure(name="job", token=1, *, begins=0.0, lasts=60.0, ending="released", owner="worker-1", now=3600.0) -> Tenure:
    begin = BEGAN + timedelta(seconds=begins)
    ended = None if ending is None else begin + timedelta(seconds=lasts)
    return Tenure(name, owner, token, begin, ended, ending, BEGAN + timedelta(seconds=now))


EVERY = [
    tenure(token=place + 1, begins=100.0 * place, lasts=80.0, ending=ending, now=600.0)
    for place, ending in enumerate([*get_args(Ending), None])
]


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def texts(picture: ET.Element) -> list[str]:
    return [node.text or "" for node in picture.iter(f"{SVG}text")]


def test_each_hold_is_a_bar_with_its_holder_its_token_and_a_title_in_words():
    picture = parse(svg(EVERY))

    bars = [node for node in picture.iter(f"{SVG}rect") if node.get("class") == "bar"]
    assert len(bars) == len(EVERY)
    assert [text for text in texts(picture) if "#" in text] == [f"worker-1 #{n}" for n in range(1, 7)]
    titles = [group.find(f"{SVG}title").text for group in picture.iter(f"{SVG}g")]
    assert titles[0] == "job, token 1: worker-1 from 2026-11-30 04:00:00 UTC until 04:01:20, released"
    assert titles[-1].endswith("still held")


def test_each_ending_has_a_colour_and_a_shape_of_its_own_and_stands_in_the_legend():
    picture = parse(svg(EVERY))

    marks = list(picture.iter(f"{SVG}path"))[: len(EVERY)]
    assert len({node.get("d") for node in marks}) == len(EVERY)
    assert len({node.get("fill") or node.get("stroke") for node in marks}) == len(EVERY)
    assert set(WORDS.values()) <= set(texts(picture))


def test_a_screen_reader_hears_what_the_picture_shows():
    picture = parse(svg(EVERY, title="Nights"))

    assert picture.get("role") == "img"
    named = {node.get("id"): node.text for node in picture if node.get("id")}
    assert picture.get("aria-labelledby").split() == ["title", "desc"]
    assert named["title"] == "Nights"
    assert "job: 6 holds (1 released, 1 ran out, 1 its session died" in named["desc"]
    assert "the last by worker-1, token 6" in named["desc"]


def mixed(colour: str, paper: str, share: float = 0.22) -> str:
    parts = [
        round(share * int(colour[at : at + 2], 16) + (1 - share) * int(paper[at : at + 2], 16)) for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def palettes() -> list[dict[str, str]]:
    found = re.findall(r"--(\w+): (#[0-9a-f]{6})", svg([]))
    return [dict(found[:4]), dict(found[4:])]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_the_paper_and_on_every_bar_in_light_and_in_dark(mode):
    colours = palettes()[mode]

    assert contrast(colours["ink"], colours["paper"]) >= 7
    assert contrast(colours["faint"], colours["paper"]) >= 4.5
    for bar in _COLOURS.values():
        assert contrast(colours["ink"], mixed(bar, colours["paper"])) >= 4.5, bar
    assert max(contrast(bar, colours["paper"]) for bar in _COLOURS.values()) >= 3


def test_it_asks_for_nothing_from_elsewhere_and_runs_nothing():
    text = svg(EVERY)

    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"url\(|@import|@font-face|<script|<image|<use|href", text)


def test_hostile_names_stay_text():
    hostile = "</title><script>alert(1)</script>&\"'\ufffe"

    picture = parse(svg([tenure(hostile, owner=hostile)], title=hostile))

    assert not list(picture.iter(f"{SVG}script"))
    assert "<script>alert(1)</script>" in picture.find(f"{SVG}title").text


def test_a_name_does_not_turn_the_text_after_it():
    text = svg([tenure("job\u202e", owner="w\u2066")])

    assert not set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069") & set(text)


def test_rows_are_leases_in_their_order_and_long_names_are_cut():
    picture = parse(svg([tenure("b"), tenure("a"), tenure("c" * 200)]))

    labels = [text for text in texts(picture) if text in {"a", "b"} or text.startswith("cccc")]
    assert labels[:2] == ["a", "b"]
    assert labels[2].endswith("…")


def test_nothing_known_is_said():
    assert "no hold is known" in texts(parse(svg([])))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_stays_on_the_paper(seed):
    chance = random.Random(seed)
    span = 10 ** chance.uniform(-3, 7)
    holds = [
        tenure(
            f"lease {chance.randrange(4)}",
            token,
            begins=chance.uniform(0, span),
            lasts=chance.uniform(0, span),
            ending=chance.choice([*get_args(Ending), None]),
            now=2 * span,
        )
        for token in range(chance.randrange(1, 60))
    ]

    picture = parse(svg(holds))

    for node in itertools.chain(picture.iter(f"{SVG}rect"), picture.iter(f"{SVG}text")):
        x, width = float(node.get("x", 0)), float(node.get("width", 0))
        assert 0 <= x <= x + width <= WIDTH
    ticks = list(picture.iter(f"{SVG}line"))
    assert len(ticks) <= 10


def test_a_run_under_faults_is_drawn_by_what_each_process_believed_and_how_that_ended():
    history = History.of(
        [
            Op("1", "p1", "acquire", "job", 10.0, 10.1, "ok", 1),
            Look("1", 11.0, 12.0),
            Op("1:release", "p1", "release", "job", 11.5, 11.6, "ok", 1),
            Op("2", "p2", "acquire", "job", 11.7, 11.8, "ok", 2),
            Look("2", 12.0, 14.0),
            Fault("kill", 13.0, 13.0, "p2"),
            Op("3", "p1", "acquire", "job", 15.0, 15.1, "ok", 3),
            Look("3", 15.2, 18.0),
            Told("3", 16.0, 18.0, "forced"),
        ]
    )

    text = picture(history, "seed 7")

    titles = [group.find(f"{SVG}title").text for group in parse(text).iter(f"{SVG}g")]
    assert [title.rsplit(", ", 1)[1] for title in titles] == ["released", "its session died", "ended by an operator"]
    assert "seed 7" in text

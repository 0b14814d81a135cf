"""`history`: who held a lease, for people, for programs, and as a picture."""

import json
from xml.etree import ElementTree as ET

import pytest

from pglease import PGLease


@pytest.fixture
def kept(dsn):
    """Two holds that ended and one that goes on."""
    with PGLease(f"{dsn}{'&' if '?' in dsn else '?'}pglease.history=9", owner_id="wörker") as client:
        for _ in range(2):
            with client.acquire("job", ttl="10m"):
                pass
        assert client.try_acquire("job", ttl="10m")
        yield client


def test_history_prints_a_line_for_each_hold(call, kept):
    code, out, err = call("history", "job")

    assert (code, err) == (0, "")
    header, *lines = out.splitlines()
    assert header.split() == ["NAME", "TOKEN", "HOLDER", "SINCE", "FOR", "END"]
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert [
        line.rstrip().endswith(end) for line, end in zip(lines, ("released", "released", "still held"), strict=True)
    ]


def test_history_for_programs_is_one_object_a_line(call, kept):
    lines = [json.loads(line) for line in call("history", "--prefix", "j", "--limit", "2", "--json")[1].splitlines()]

    assert [(line["fencing_token"], line["ending"]) for line in lines] == [(2, "released"), (3, None)]
    assert lines[0]["ended_at"] is not None


def test_history_draws_a_picture(call, kept, tmp_path):
    file = tmp_path / "job.svg"

    code, out, err = call("history", "job", "--svg", str(file))

    assert (code, out, err) == (0, "", "")
    assert "Who held job" in ET.parse(file).getroot()[0].text
    assert call("history", "job", "--svg", "-")[1].startswith("<svg")


def test_history_of_what_nobody_held_is_nothing(call):
    code, out, err = call("history", "job")

    assert (code, out) == (1, "")
    assert "no hold is known of 'job'" in err
    assert call("history", "job", "-q")[2] == ""


def test_history_of_a_name_and_a_prefix_is_bad_usage(call):
    assert call("history", "job", "--prefix", "j")[0] == 2

"""What users may ask for is checked once; every broken rule is named with its value."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pglease import options
from pglease.errors import ConfigurationError
from pglease.options import hold_options, interval_for, margin_for, renewal_box
from pglease.records import Handover
from pglease.slots import Every

HANDOVER = Handover("job", "0123456789abcdef" * 2, "web-1", 7, 30.0)
legal_characters = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=["\u2028", "\u2029"])
legal_names = st.text(legal_characters, min_size=1, max_size=255)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(legal_characters, max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(legal_characters, max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ttls = st.floats(min_value=0.001, max_value=options.MAX_DURATION)


# -- durations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (60, 60.0),
        (0.25, 0.25),
        (timedelta(minutes=5), 300.0),
        (timedelta(milliseconds=1), 0.001),
        ("90s", 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("90", 90.0),
        ("0.5", 0.5),
        (" 5m ", 300.0),
        ("2d", 172800.0),
    ],
    ids=repr,
)
def test_a_duration_is_read_as_seconds(value, wanted: float) -> None:
    assert options.seconds(value, "ttl") == wanted


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        -0.001,
        "0s",
        "-5s",
        timedelta(0),
        timedelta(seconds=-1),
        math.nan,
        math.inf,
        -math.inf,
        "inf",
        "nan",
        True,
        False,
        None,
        "",
        " ",
        "soon",
        "5 minutes",
        "1e3",
        "5M",
        "1h30",
        [60],
        60j,
        b"60",
        10**400,
        options.MAX_DURATION * 1.01,
        "200y",
        timedelta.max,
    ],
    ids=repr,
)
def test_what_is_no_duration_is_refused_with_its_argument_and_its_value(value) -> None:
    with pytest.raises(ConfigurationError) as refused:
        options.seconds(value, "min_hold")

    (problem,) = refused.value.problems
    assert problem.startswith("min_hold must be ")
    if isinstance(value, float | str | bool | None):
        assert repr(value.strip() if isinstance(value, str) else value) in problem or "100 years" in problem


def test_zero_and_for_ever_are_read_where_they_make_sense() -> None:
    assert options.seconds(0, "wait", zero=True) == 0.0
    assert options.seconds("0s", "wait", zero=True) == 0.0
    assert options.seconds(math.inf, "wait", forever=True) == math.inf
    assert options.seconds("forever", "wait", forever=True) == math.inf
    with pytest.raises(ConfigurationError, match="0 or more"):
        options.seconds(-1, "wait", zero=True, forever=True)
    with pytest.raises(ConfigurationError):
        options.seconds(-math.inf, "wait", zero=True, forever=True)


def test_a_refused_duration_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="ttl"):
        options.seconds("soon", "ttl")


@given(ttls)
def test_a_number_of_seconds_is_itself(value: float) -> None:
    assert options.seconds(value, "ttl") == value


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=36_000)))
def test_a_timedelta_is_its_seconds(value: timedelta) -> None:
    assert options.seconds(value, "ttl") == value.total_seconds()


@given(hours=st.integers(0, 99), minutes=st.integers(0, 59), secs=st.integers(1, 59), ms=st.integers(0, 999))
def test_text_is_the_sum_of_its_parts(hours: int, minutes: int, secs: int, ms: int) -> None:
    value = f"{hours}h{minutes}m{secs}s{ms}ms"

    assert options.seconds(value, "ttl") == pytest.approx(hours * 3600 + minutes * 60 + secs + ms / 1000)


@given(st.text(max_size=12) | st.from_regex(r"[-+]?[0-9.]{0,4}[a-zµ]{0,3}[-+]?[0-9.]{0,4}[a-z]{0,2}", fullmatch=True))
@example("9" * 400)
@example("9" * 400 + "s")
@example("1\x00s")
def test_any_text_is_a_positive_finite_number_or_a_configuration_error(value: str) -> None:
    try:
        number = options.seconds(value, "ttl")
    except ConfigurationError:
        return
    assert 0 < number <= options.MAX_DURATION


@pytest.mark.parametrize("value", ["1h-5m", "5m+3s", "٣m"])
def test_text_that_contradicts_itself_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError):
        options.seconds(value, "ttl")


# -- names -----------------------------------------------------------------------------------------------------------


@given(legal_names)
@example("x")
@example("n" * 255)
@example("\N{ROCKET}" * 255)
@example(" ")
@example("cafe\u0301")
@example("\u200f")
def test_a_legal_name_is_returned_unchanged(name: str) -> None:
    assert options.text(name, "name") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "n" * 256,
        "a\x00b",
        "a\nb",
        "tab\t",
        "\x7f",
        "\x85",
        "a\u2028b",
        "\ud800",
        "emoji half \udf19",
        None,
        7,
        b"job",
        ["job"],
    ],
    ids=ascii,
)
def test_what_is_no_name_is_refused_and_the_message_can_be_printed(name) -> None:
    with pytest.raises(ConfigurationError) as refused:
        options.text(name, "name")

    assert str(refused.value).startswith("name must ")
    str(refused.value).encode("utf-8")


def test_a_name_that_is_too_long_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigurationError) as refused:
        options.text("n" * 100_000, "name")

    assert str(refused.value).endswith(f"characters, not 100000 ('{'n' * 40}'…)")


@given(st.text(min_size=1, max_size=300))
def test_any_text_is_a_name_as_it_stands_or_a_configuration_error(value: str) -> None:
    try:
        assert options.text(value, "name") == value
    except ConfigurationError:
        return
    assert 1 <= len(value) <= 255
    assert value.encode("utf-8").decode("utf-8") == value
    assert not any(ord(character) < 32 for character in value)


def test_a_prefix_may_be_empty_and_is_held_to_the_same_rules() -> None:
    assert options.prefix("") == ""
    assert options.prefix("a_%") == "a_%"
    with pytest.raises(ConfigurationError, match="prefix"):
        options.prefix("a\x00")


# -- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None], ids=repr)
def test_a_count_is_a_whole_number_from_its_least_on(value) -> None:
    with pytest.raises(ConfigurationError, match="limit must be a whole number of at least 1, not"):
        options.count(value, "limit")


def test_a_count_is_returned_as_it_is() -> None:
    assert options.count(3, "limit") == 3
    assert options.count(0, "limit", least=0) == 0


@pytest.mark.parametrize("value", [0, 1, None, "yes"], ids=repr)
def test_a_switch_is_true_or_false(value) -> None:
    with pytest.raises(ConfigurationError, match=r"fair must be True or False, not"):
        options.flag(value, "fair")


def test_a_choice_names_what_is_allowed() -> None:
    assert options.choice("log", "on_lost", ("raise", "log")) == "log"
    with pytest.raises(ConfigurationError, match=r"on_lost must be one of 'raise', 'log', not 'ignore'"):
        options.choice("ignore", "on_lost", ("raise", "log"))


# -- metadata --------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(legal_characters, max_size=10), json_values, max_size=5))
def test_metadata_comes_back_as_json_would_read_it(value: dict) -> None:

    assert dict(options.metadata(value)) == json.loads(json.dumps(value)) == value


def test_no_metadata_is_an_empty_mapping() -> None:
    assert dict(options.metadata(None)) == {}
    assert dict(options.metadata({})) == {}


def test_metadata_is_a_copy_all_the_way_down() -> None:
    given_to_us = {"hosts": ["a1"]}

    kept = options.metadata(given_to_us)
    given_to_us["hosts"].append("b2")

    assert dict(kept) == {"hosts": ["a1"]}


@pytest.mark.parametrize(
    "value",
    [
        [],
        "text",
        7,
        {1: "a"},
        {"a": math.nan},
        {"a": math.inf},
        {"a": b"bytes"},
        {"a": {1, 2}},
        {"a": object()},
        {"a": "\x00"},
        {"\x00": 1},
        {"a": "\ud800"},
        {"a": "x" * 8192},
        {"a": "\N{ROCKET}" * 2050},
        {"a": 10**5000},
    ],
    ids=itertools.count(),
)
def test_what_is_no_json_object_of_modest_size_is_refused(value) -> None:
    with pytest.raises(ConfigurationError, match="metadata must"):
        options.metadata(value)


def nested(levels: int) -> dict:
    value: list = []
    for _ in range(levels - 2):
        value = [value]
    return {"a": value}


def test_metadata_may_have_sixteen_levels() -> None:
    assert options.metadata(nested(16))
    with pytest.raises(ConfigurationError, match="16 levels"):
        options.metadata(nested(17))


def test_metadata_that_contains_itself_is_refused() -> None:
    value: dict = {}
    value["self"] = value

    with pytest.raises(ConfigurationError, match="metadata must"):
        options.metadata(value)


def test_metadata_of_very_many_levels_is_refused_in_plain_words() -> None:
    with pytest.raises(ConfigurationError, match="metadata must"):
        options.metadata(nested(900))


def test_text_that_only_looks_like_an_escaped_nul_is_kept() -> None:
    assert dict(options.metadata({"a": r"\u0000"})) == {"a": r"\u0000"}


def test_keys_below_the_first_level_are_not_silently_changed_into_text() -> None:
    with pytest.raises(ConfigurationError, match="metadata must have text for keys"):
        options.metadata({"a": {1: "one"}})


# -- margins and intervals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ttl", "wanted"), [(60, 3.0), (10, 0.5), (2, 0.25), (1, 0.25), (0.4, 0.1), (3600, 180)])
def test_the_margin_is_a_twentieth_within_bounds(ttl: float, wanted: float) -> None:
    assert margin_for(ttl) == pytest.approx(wanted)


@given(ttls, st.none() | st.floats(0, 1e9))
def test_a_margin_never_takes_more_than_a_quarter(ttl: float, margin: float | None) -> None:
    assert 0 <= margin_for(ttl, margin) <= ttl / 4


@given(ttls, st.none() | st.floats(0.001, 1e9))
def test_a_lease_is_renewed_three_times_per_ttl_whatever_was_asked(ttl: float, interval: float | None) -> None:
    assert 0 < interval_for(ttl, interval) <= ttl / 3


@pytest.mark.parametrize(
    ("ttl", "asked", "wanted"), [(10, 10, 10 / 3), (9, None, 3), (60, 5, 5), (60, 20, 20), (60, 21, 20)]
)
def test_the_interval_is_an_upper_bound(ttl: float, asked: float | None, wanted: float) -> None:
    assert interval_for(ttl, asked) == pytest.approx(wanted)


@pytest.mark.parametrize(("ttl", "margin", "interval", "wanted"), [(10, 0.5, 3.5, 2.7), (60, 3, 20, 5), (600, 1, 1, 5)])
def test_a_renewal_may_take_not_quite_half_of_what_is_left_and_five_seconds_at_most(
    ttl: float, margin: float, interval: float, wanted: float
) -> None:
    assert renewal_box(ttl, margin, interval) == pytest.approx(wanted)


@given(ttls, st.none() | st.floats(0.001, 1e9))
def test_after_a_good_renewal_two_whole_tries_fit_before_the_deadline(ttl: float, asked: float | None) -> None:
    margin, interval = margin_for(ttl), interval_for(ttl, asked)

    box = renewal_box(ttl, margin, interval)

    assert 0 < box <= 5
    assert interval + 2 * box < ttl - margin


# -- one acquisition -------------------------------------------------------------------------------------------------


def test_the_usual_call_needs_a_name_and_a_ttl() -> None:
    usual = hold_options("job", "5m")

    assert (usual.name, usual.ttl, usual.wait, usual.min_hold, usual.max_hold) == ("job", 300.0, None, 0.0, None)
    assert (usual.heartbeat, usual.fair, usual.on_lost, dict(usual.metadata)) == (True, False, "raise", {})


def test_every_option_is_read() -> None:
    full = hold_options(
        "job",
        60,
        wait="inf",
        min_hold="10s",
        max_hold="1h",
        metadata={"a": 1},
        heartbeat=False,
        fair=True,
        on_lost="log",
    )

    assert (full.wait, full.min_hold, full.max_hold, full.heartbeat) == (math.inf, 10.0, 3600.0, False)
    assert (full.fair, full.on_lost, dict(full.metadata)) == (True, "log", {"a": 1})


@pytest.mark.parametrize(
    ("option", "said", "read"),
    [
        ("wait", "5s", 5.0),
        ("min_hold", 10, 10.0),
        ("max_hold", 10, 10.0),
        ("metadata", {"a": 1}, {"a": 1}),
        ("heartbeat", False, False),
        ("fair", True, True),
        ("on_lost", "log", "log"),
        ("once_per", Every(3600.0), Every(3600.0)),
        ("warn_after", 5, 5.0),
        ("warn_after", None, None),
    ],
)
def test_an_option_that_is_said_alone_is_read_and_changes_no_other(option: str, said: object, read: object) -> None:
    assert hold_options("job", 60, **{option: said}) == replace(hold_options("job", 60), **{option: read})


@pytest.mark.parametrize("option", ["heartbeat", "fair"])
@pytest.mark.parametrize("said", [0, 1, None])
def test_what_only_looks_like_a_switch_is_refused_however_it_compares(option: str, said: object) -> None:
    with pytest.raises(ConfigurationError, match=f"^{option} must be True or False"):
        hold_options("job", 60, **{option: said})


def test_only_a_task_can_be_cancelled_for_a_loss() -> None:
    assert hold_options("job", 60, on_lost="cancel", in_a_task=True).on_lost == "cancel"
    with pytest.raises(ConfigurationError, match="on_lost must be one of 'raise', 'log', 'exit', not 'cancel'"):
        hold_options("job", 60, on_lost="cancel")


def test_the_short_way_and_the_long_way_read_the_same() -> None:
    assert hold_options("job", "90s") == hold_options("job", 90.0, min_hold=0)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        hold_options("", -1, wait="soon", min_hold=-2, max_hold=0, metadata=[], heartbeat=1, fair="x", on_lost="y")

    first_words = [problem.split()[0] for problem in refused.value.problems]
    assert first_words == ["name", "ttl", "wait", "min_hold", "max_hold", "metadata", "heartbeat", "fair", "on_lost"]


@pytest.mark.parametrize(("name", "ttl"), [("", 60), ("job", 0), ("job", None)])
def test_the_usual_call_is_checked_too(name: str, ttl) -> None:
    with pytest.raises(ConfigurationError):
        hold_options(name, ttl)


def test_waiting_may_be_zero_and_for_ever_but_holding_may_not() -> None:
    assert hold_options("job", 60, wait=0).wait == 0.0
    with pytest.raises(ConfigurationError, match="max_hold"):
        hold_options("job", 60, max_hold=math.inf)
    with pytest.raises(ConfigurationError, match="min_hold"):
        hold_options("job", 60, min_hold=math.inf)


def test_min_hold_may_not_exceed_max_hold() -> None:
    assert hold_options("job", 60, min_hold=10, max_hold=10)
    with pytest.raises(ConfigurationError, match=r"min_hold \(11 s\) must not exceed max_hold \(10 s\)"):
        hold_options("job", 60, min_hold=11, max_hold=10)


def test_min_hold_above_the_ttl_needs_renewal() -> None:
    assert hold_options("job", 60, min_hold=61)
    assert hold_options("job", 60, min_hold=60, heartbeat=False)
    with pytest.raises(ConfigurationError, match="needs renewal"):
        hold_options("job", 60, min_hold=61, heartbeat=False)


def test_options_of_a_hold_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        hold_options("job", 60).ttl = 1.0  # type: ignore[misc]


# -- one that is gone on with ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [HANDOVER, str(HANDOVER)], ids=["a record", "its text"])
def test_a_handover_is_gone_on_with_by_its_name_its_ttl_and_its_id(shown) -> None:
    wanted = options.adoption(shown)

    assert wanted == options.HoldOptions("job", 30.0, adopts=HANDOVER.lease_id)


def test_whoever_goes_on_with_a_handover_may_say_otherwise() -> None:
    wanted = options.adoption(HANDOVER, "1m", min_hold=5, on_lost="log")

    assert wanted == options.HoldOptions("job", 60.0, min_hold=5.0, on_lost="log", adopts=HANDOVER.lease_id)
    with pytest.raises(ConfigurationError, match="ttl must be more than 0"):
        options.adoption(HANDOVER, 0)


@pytest.mark.parametrize("shown", [None, 7, b"pglease-handover-1:"])
def test_what_is_no_handover_is_refused_without_being_shown(shown) -> None:
    with pytest.raises(ConfigurationError, match=f"its text, not {type(shown).__name__}$"):
        options.adoption(shown)


# -- one that is waited for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "wait"), [(None, math.inf), ("forever", math.inf), (math.inf, math.inf), ("1m", 60.0), (0.5, 0.5)]
)
def test_a_lease_is_waited_for_as_long_as_was_said_with_looks_as_often(timeout, wait: float) -> None:
    wanted, poll = options.waiting_options("job", "5m", timeout, "500ms", fair=True)

    assert wanted == options.HoldOptions("job", 300.0, wait=wait, fair=True)
    assert poll == 0.5


def test_all_that_is_wrong_about_waiting_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        options.waiting_options("", -1, 0, math.inf)

    assert [problem.split()[0] for problem in refused.value.problems] == ["timeout", "poll_interval", "name", "ttl"]


# -- the usual one -----------------------------------------------------------------------------------------------------


def test_a_name_and_a_ttl_are_usual_if_they_alone_would_do() -> None:
    assert options.are_usual("job", "5m") is True


@pytest.mark.parametrize(
    ("name", "ttl"), [("", 60), (7, 60), ("job", 0), ("job", True), ("job", "soon"), ("job", [60])]
)
def test_what_would_be_refused_is_not_usual(name, ttl) -> None:
    assert options.are_usual("job", 1)  # which is what True compares as, and may be remembered

    assert options.are_usual(name, ttl) is False


# -- the limits, to the letter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "last", "beyond"),
    [
        (lambda value: options.seconds(value, "ttl"), 100 * 365 * 86400, 100 * 365 * 86400 + 1),
        (lambda value: options.text(value, "name"), "x" * 255, "x" * 256),
        (lambda value: options.stem(value, "name"), "x" * 240, "x" * 241),
        (lambda value: options.limit(value, "limit"), 10_000, 10_001),
        (lambda value: options.count(value, "count"), 1, 0),
        (lambda value: options.count(value, "count", least=3), 3, 2),
        (options.metadata, {"a": "x" * (8192 - len('{"a": ""}'))}, {"a": "x" * (8193 - len('{"a": ""}'))}),
    ],
    ids=["duration", "name", "stem", "limit", "count", "least", "metadata"],
)
def test_what_is_just_allowed_is_taken_and_what_is_just_beyond_is_refused(read, last, beyond) -> None:
    assert read(last) == last
    with pytest.raises(ConfigurationError):
        read(beyond)


def test_an_endless_duration_is_refused_as_one() -> None:
    with pytest.raises(ConfigurationError, match="finite"):
        options.seconds(math.inf, "ttl")
    with pytest.raises(ConfigurationError, match="more than 0"):
        options.seconds(-math.inf, "ttl", forever=True)


def test_what_is_not_said_about_a_hold_is_this() -> None:
    wanted = hold_options("job", 60)

    assert (wanted.wait, wanted.min_hold, wanted.max_hold, wanted.heartbeat) == (None, 0.0, None, True)
    assert (wanted.fair, wanted.on_lost, wanted.once_per, wanted.warn_after, wanted.adopts) == (
        False, "raise", None, 60.0, None,
    )  # fmt: skip
    assert wanted == options.HoldOptions("job", 60.0)


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(None, math.inf), (math.inf, math.inf), (0, 0.0), ("5s", 5.0), (timedelta(minutes=1), 60.0)],
)
def test_a_call_may_wait_for_ever_for_a_while_or_not_at_all(timeout, seconds):
    assert options.wait(timeout, "timeout") == seconds

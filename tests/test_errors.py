"""The errors keep their facts, their family and themselves through pickling."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import traceback

import pytest

from pglease import errors
from pglease.errors import (
    AcquireTimeout,
    AcquisitionError,
    BackendClosed,
    BackendError,
    BackendMisconfigured,
    BackendUnavailable,
    ConfigurationError,
    FencedError,
    HeartbeatError,
    LeaseLostError,
    MissingDependencyError,
    NotOwnedError,
    PgleaseError,
    ReentrantError,
    ReleaseError,
)

ONE_OF_EACH: list[PgleaseError] = [
    PgleaseError("something"),
    AcquisitionError("held", name="job", held_by="web-1", retry_after=12.5),
    AcquireTimeout("ran out", name="job", held_by=None, retry_after=None),
    LeaseLostError("lost", name="job", reason="taken"),
    NotOwnedError("ended", name="job"),
    ReentrantError("mine", name="job"),
    FencedError("stale", name="job", fencing_token=7),
    ConfigurationError("ttl must be more than 0", "name must not be empty"),
    BackendError("store"),
    BackendUnavailable("gone", outcome_unknown=True),
    ReleaseError("not confirmed", name="job"),
    BackendMisconfigured("no table"),
    BackendClosed("closed"),
    MissingDependencyError("install pglease[redis]"),
]
FAMILY = {
    PgleaseError: Exception,
    AcquisitionError: PgleaseError,
    AcquireTimeout: AcquisitionError,
    LeaseLostError: PgleaseError,
    NotOwnedError: PgleaseError,
    ReentrantError: PgleaseError,
    FencedError: PgleaseError,
    ConfigurationError: PgleaseError,
    BackendError: PgleaseError,
    BackendUnavailable: BackendError,
    ReleaseError: BackendError,
    BackendMisconfigured: BackendError,
    BackendClosed: BackendError,
    MissingDependencyError: BackendError,
}
each_error = pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
each_way = pytest.mark.parametrize(
    "copied",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)


def test_this_file_knows_every_error() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PgleaseError)}

    assert kinds == set(FAMILY) == {type(error) for error in ONE_OF_EACH}


@pytest.mark.parametrize(("kind", "parent"), FAMILY.items(), ids=lambda kind: kind.__name__)
def test_each_error_has_its_place_in_the_family(kind: type, parent: type) -> None:
    assert kind.__bases__[0] is parent


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(AcquireTimeout, TimeoutError), (ConfigurationError, ValueError), (MissingDependencyError, ImportError)],
)
def test_some_errors_are_also_what_python_calls_them(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_the_old_name_of_a_lost_lease_still_works() -> None:
    assert HeartbeatError is LeaseLostError


@each_way
@each_error
def test_a_copy_has_type_text_and_facts(error, copied) -> None:
    again = copied(error)

    assert type(again) is type(error)
    assert str(again) == str(error) != ""
    assert again.args == error.args
    assert vars(again) == vars(error)


@each_way
@each_error
def test_a_copy_keeps_notes(error, copied) -> None:
    noted = copy.copy(error)
    noted.add_note("seen by web-1")

    assert copied(noted).__notes__ == ["seen by web-1"]


@each_error
def test_every_pickle_protocol_works(error) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert vars(pickle.loads(pickle.dumps(error, protocol))) == vars(error)


@each_error
def test_a_copy_can_be_raised_and_printed(error) -> None:
    with pytest.raises(type(error)) as caught:
        raise pickle.loads(pickle.dumps(error))

    assert str(error) in "".join(traceback.format_exception(caught.value))


@each_error
def test_a_copy_does_not_share_its_facts_with_the_original(error) -> None:
    again = copy.copy(error)
    again.extra = 1

    assert not hasattr(error, "extra")


@each_error
def test_each_error_crosses_a_process_boundary(error) -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(error)

    again = queue.get()

    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_subclass_of_a_user_survives_pickling_too() -> None:
    error = OurTimeout("late", name="job", held_by="web-1")
    error.ticket = "T-1"

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), again.name, again.held_by, again.ticket) == (OurTimeout, "job", "web-1", "T-1")


class OurTimeout(AcquireTimeout):
    ticket: str


def test_a_configuration_error_says_every_broken_rule() -> None:
    error = ConfigurationError("ttl must be more than 0", "name must not be empty")

    assert error.problems == ("ttl must be more than 0", "name must not be empty")
    assert str(error) == "ttl must be more than 0; name must not be empty"


def test_an_acquire_timeout_has_no_errno() -> None:
    error = AcquireTimeout("ran out", name="job")

    assert error.errno is None
    assert str(error) == "ran out"


def test_trouble_is_not_said_to_be_ambiguous_unless_it_is() -> None:
    assert BackendUnavailable("refused").outcome_unknown is False


def test_a_missing_dependency_keeps_the_name_of_the_module() -> None:
    error = MissingDependencyError("install pglease[redis]", name="redis")

    assert (error.name, str(error)) == ("redis", "install pglease[redis]")


def test_the_name_of_the_module_survives_pickling() -> None:
    error = MissingDependencyError("install pglease[redis]", name="redis")

    assert pickle.loads(pickle.dumps(error)).name == "redis"


@each_error
def test_the_text_alone_makes_an_error_with_empty_facts(error) -> None:
    again = type(error)(str(error))

    assert str(again) == str(error)
    assert vars(again).keys() == vars(error).keys()


def test_an_error_that_was_told_no_token_has_none():
    assert FencedError("refused").fencing_token == 0

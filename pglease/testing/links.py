"""A store seen through something that may stand in between: a link that can be cut, a double that answers instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pglease.backends.base import Backend, Budget, Traits
from pglease.errors import BackendUnavailable
from pglease.records import Renewal, RenewalOutcome

VERBS = (
    "try_acquire",
    "try_acquire_many",
    "renew",
    "release",
    "force_release",
    "adopt",
    "set_metadata",
    "get",
    "list",
    "cleanup",
    "guard",
    "fence_sql",
    "listen",
    "mark",
    "queue",
    "leave_queue",
    "queued",
    "queues",
    "history",
)
"""What a store may be asked."""


def through(ask: Callable[..., Any]) -> Callable[[type], type]:
    """Decorate a class so that each verb is `ask(self, verb, arguments, keywords)`.

    The verbs are real methods: a store is told by them, without calling any.
    """

    def verb_of(verb: str) -> Callable[..., Any]:
        def asked(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return ask(self, verb, arguments, keywords)

        asked.__name__ = verb
        return asked

    def decorate(cls: type) -> type:
        for verb in VERBS:
            setattr(cls, verb, verb_of(verb))
        return cls

    return decorate


def _if_whole(link: Link, verb: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if link.cut:
        raise BackendUnavailable("the link to the store was cut by the test")
    return getattr(link.store, verb)(*arguments, **keywords)


@through(_if_whole)
class Link:
    """A store behind a link. Cut, every question is answered by `BackendUnavailable`, at once.

    Attributes:
        store: the store itself.
        cut: whether it is cut now.
    """

    def __init__(self, store: Backend) -> None:
        self.store = store
        self.cut = False

    @property
    def traits(self) -> Traits:
        """What the store can promise."""
        return self.store.traits

    def forget(self) -> None:
        """Pass on."""
        self.store.forget()

    def close(self) -> None:
        """Pass on."""
        self.store.close()


_OF_ONE_HOLD = frozenset({"release", "adopt", "set_metadata", "guard", "fence_sql"})


def _by_whoever_granted(double: Double, verb: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    instead = double.instead()
    store: Any = instead or double.store
    if instead is not None and verb == "renew":
        return _renewed(double.store, instead, *arguments)
    if instead is not None and verb in _OF_ONE_HOLD:
        lease_id = arguments[1] if isinstance(arguments[0], str) else arguments[0].lease_id
        store = instead if instead.granted(lease_id) else double.store
    return getattr(store, verb)(*arguments, **keywords)


def _renewed(store: Backend, instead: Any, renewals: Sequence[Renewal], budget: Budget) -> list[RenewalOutcome]:
    """Have each hold renewed by whoever granted it."""
    outcomes: dict[str, RenewalOutcome] = {}
    for whose, theirs in ((instead, True), (store, False)):
        some = [each for each in renewals if instead.granted(each.lease_id) is theirs]
        if some:
            outcomes |= zip((each.lease_id for each in some), whose.renew(some, budget), strict=True)
    return [outcomes[each.lease_id] for each in renewals]


@through(_by_whoever_granted)
class Double:
    """A store that another one may answer for, for a while; holds from before go on in the store itself.

    Args:
        store: the store itself.
        instead: returns who answers now, or None.
    """

    def __init__(self, store: Backend, instead: Callable[[], Any]) -> None:
        self.store = store
        self.instead = instead

    @property
    def traits(self) -> Traits:
        """What whoever answers can promise."""
        answering: Backend = self.instead() or self.store
        return answering.traits

    def forget(self) -> None:
        """Pass on."""
        self.store.forget()

    def close(self) -> None:
        """Pass on."""
        self.store.close()

"""What a hold may rest on besides its ttl: a session of its holder's, whose death frees the name at once.

A backend that has such sessions hands out a `Bond` with each grant, keeps it informed, and breaks it when the session
is dead. Whoever holds the lease asks the bond at each look at `held`, so that no thread has to run for it to turn
false, and is told besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pglease.records import Loss


class Anchor(Protocol):
    """What a bond is tied to: something that may end."""

    @property
    def until(self) -> float:
        """The boot clock until which it may be relied upon unless it proves to be alive; infinity for no limit."""


class Bond:
    """One hold's dependence. Loose at first, tied at most once, broken at most once, and then for good.

    Attributes:
        anchor: what it is tied to; None while it is loose and the hold rests on its ttl alone.
        loss: why it broke; None while it has not.
    """

    __slots__ = ("_listeners", "anchor", "loss")

    def __init__(self) -> None:
        self.anchor: Anchor | None = None
        self.loss: Loss | None = None
        self._listeners: list[Callable[[Loss], object]] = []

    @property
    def until(self) -> float:
        """The boot clock when the hold must not be believed any more for the bond's sake; in the past once broken."""
        if self.loss is not None:
            return float("-inf")
        return float("inf") if self.anchor is None else self.anchor.until

    def tie(self, anchor: Anchor) -> None:
        """Have the hold depend on `anchor` from now on."""
        self.anchor = anchor

    def untie(self) -> None:
        """Have the hold rest on its ttl alone: what it was tied to has nothing to do with it any more."""
        self.anchor = None

    def sever(self, loss: Loss) -> None:
        """Note that it broke, without telling anybody yet: many bonds break together, and all of them first."""
        self.loss = self.loss or loss

    def tell(self) -> None:
        """Tell whoever listens that it broke; each of them once."""
        loss = self.loss
        while loss is not None and self._listeners:
            try:
                listener = self._listeners.pop()
            except IndexError:  # another thread was quicker
                return
            listener(loss)

    def when_broken(self, listener: Callable[[Loss], object]) -> None:
        """Call `listener` once it breaks, on whatever thread notices; at once, on this one, if that has happened."""
        self._listeners.append(listener)
        self.tell()

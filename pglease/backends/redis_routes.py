"""Which node a key lives on: the one of the address, or, in a Cluster, whichever has the key's slot now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot

from pglease.backends.redis_errors import Elsewhere, Node

_NO_ADDRESS = (b"", b"?")
"""A Cluster that knows no address of a node says one of these: it is the address that was asked."""


class Routes:
    """The map of a Cluster, as far as it is known; without a Cluster, one node for everything.

    Attributes:
        home: the node of the address.
        is_cluster: whether the server is part of a Cluster.
        is_stale: whether the map is to be read again before it is used.
    """

    def __init__(self, home: Node) -> None:
        self.home = home
        self.is_cluster = False
        self.is_stale = False
        self._slots: dict[int, Node] = {}
        self._others: list[Node] = []
        self._doubted: frozenset[Node] = frozenset()

    @property
    def has_map(self) -> bool:
        """Whether the map was ever read."""
        return bool(self._slots)

    def of(self, key: bytes) -> Node:
        """Return the node that has `key`."""
        return self._slots.get(key_slot(key), self.home) if self.is_cluster else self.home

    def primaries(self) -> list[Node]:
        """Return every node that has keys."""
        return list(dict.fromkeys(self._slots.values())) or [self.home]

    def known(self) -> list[Node]:
        """Return every node that may know the map, those last that did not answer."""
        return sorted(dict.fromkeys([*self._slots.values(), *self._others, self.home]), key=self.is_doubted)

    def is_doubted(self, node: Node) -> bool:
        """Tell whether a node did not answer the last time: whoever has others to ask asks them first."""
        return node in self._doubted

    def doubt(self, node: Node) -> None:
        """Note that a node did not answer; in a Cluster a replica may be the primary now."""
        if self.is_cluster:
            self._doubted, self.is_stale = self._doubted | {node}, True

    def trust(self, node: Node) -> None:
        """Note that a node answered."""
        if node in self._doubted:
            self._doubted -= {node}

    def follow(self, elsewhere: Elsewhere, asked: Node) -> None:
        """Learn from a redirection that one slot has moved; others may have too."""
        self.is_cluster = self.is_stale = True
        self._slots = {**self._slots, elsewhere.slot: self._reached(elsewhere.node, asked)}

    def learn(self, answer: Sequence[Any], asked: Node) -> None:
        """Read the answer to CLUSTER SLOTS: ranges, each with its primary first."""
        slots: dict[int, Node] = {}
        others: list[Node] = []
        for first, last, primary, *replicas in answer:
            node = self._address(primary, asked)
            slots.update(dict.fromkeys(range(first, last + 1), node))
            others += [self._address(replica, asked) for replica in replicas]
        self._slots, self._others = slots, others
        self.is_cluster, self.is_stale = True, False
        self._doubted = (self._doubted & {*slots.values(), *others, self.home}) - {asked}

    @staticmethod
    def _reached(node: Node, asked: Node) -> Node:
        return node if node[0] else (asked[0], node[1])

    @staticmethod
    def _address(entry: Sequence[Any], asked: Node) -> Node:
        host, port = entry[0], entry[1]
        return (asked[0] if host is None or host in _NO_ADDRESS else host.decode(), port)

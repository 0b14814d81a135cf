"""The clauses of the contract by number, and which tests stand for which."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

CLAUSES = {
    "C1": "exclusive",
    "C2": "not re-entrant",
    "C3": "rising token",
    "C4": "renewal extends and keeps",
    "C5": "renewal is scoped to one hold",
    "C6": "release frees, keeps the token, is scoped to one hold",
    "C7": "expiry needs nobody",
    "C8": "no client's wall clock matters",
    "C9": "names are independent and survive",
    "C10": "looking changes nothing",
    "C11": "many threads at once",
    "C12": "trouble is not an answer",
    "C13": "ambiguity is resolved",
    "C14": "time-boxed",
    "C15": "close",
    "C16": "waking",
    "C17": "order",
    "C18": "fenced",
    "C19": "prompt",
    "C20": "handed over",
    "C21": "described",
    "C22": "all or none",
    "C23": "remembered",
    "C24": "in two halves",
}
"""Each clause in a few words; `pglease.backends.base` says them in full."""

Test = TypeVar("Test", bound=Callable[..., None])


def clauses(*names: str) -> Callable[[Test], Test]:
    """Say which clauses a test stands for."""
    unknown = set(names) - set(CLAUSES)
    if unknown or not names:
        raise ValueError(f"no such clauses: {sorted(unknown)}")

    def mark(test: Test) -> Test:
        test.clauses = names  # type: ignore[attr-defined]
        return test

    return mark


def clause_map(suite: type) -> dict[str, list[str]]:
    """Return, for each clause, the names of the tests in `suite` that stand for it."""
    tests = {name: getattr(suite, name) for name in dir(suite) if name.startswith("test_")}
    return {clause: [name for name, test in tests.items() if clause in test.clauses] for clause in CLAUSES}

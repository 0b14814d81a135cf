"""Every public name says what its user must know: it is on the page of the API, its arguments and errors are named."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pglease
from pglease import fencing, testing

ROOT = Path(__file__).resolve().parents[1]
API = (ROOT / "docs" / "api.md").read_text("utf-8")
ENTRIES = re.findall(r"^::: (pglease\.\S+)\n(?:    options: \{(?!heading)members: \[(.*)\]\})?", API, re.MULTILINE)
INNER = re.search(r"\^\(([a-z_|]+)\)\$", (ROOT / "mkdocs.yml").read_text("utf-8"))
"""Methods that the library's own modules call; the page of the API leaves them out."""
ELSEWHERE = re.compile(r"\bsee (there|`)|as for the class|\bas (for )?`|[Mm]ade by `", re.IGNORECASE)
"""A docstring that leaves arguments and errors to another one."""
CONTRACT = {"pglease.Backend", "pglease.Observer"}
"""Protocols: what they are called with is said where it is a class of its own."""


def found(name: str) -> Any:
    """Return what a dotted name means, also an attribute of a module that is imported when it is asked for."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def public() -> Iterator[tuple[str, Any]]:
    """Yield the public names, and the public methods of the classes among them that the page shows."""
    for name, members in ENTRIES:
        thing = found(name)
        yield name, thing
        shown = members.split(", ") if f"::: {name}\n    options: {{members" in API else None
        for member, value in vars(thing).items() if inspect.isclass(thing) and name not in CONTRACT else ():
            is_inner = member.startswith("_") or (INNER and member in INNER[1].split("|"))
            if not is_inner and (shown is None or member in shown):
                function = inspect.unwrap(getattr(value, "__func__", value))
                if inspect.isfunction(function):
                    yield f"{name}.{member}", function


def exported(module: ModuleType) -> set[str]:
    return {f"{module.__name__}.{name}" for name in module.__all__}


def test_every_public_name_is_on_the_page_of_the_api_once() -> None:
    names = [name for name, _ in ENTRIES]

    assert len(names) == len(set(names))
    missing = (exported(pglease) | exported(testing) | exported(fencing)) - set(names) - {"pglease.HeartbeatError"}
    assert missing == set()


def test_every_public_name_says_what_its_user_must_know() -> None:
    """In one test: to import what the frameworks' halves need takes longer than to read all docstrings."""
    wrong = [f"{name}: {problem}" for name, thing in public() if is_documented(thing) for problem in problems(thing)]

    assert wrong == []


def test_a_docstring_that_says_too_little_is_found_out() -> None:
    def silent(name: str) -> None: ...

    def halting(name: str) -> None:
        """Do something to `name`."""
        raise ValueError(name)

    assert list(problems(silent)) == ["begins with no sentence", "says nothing of name"]
    assert list(problems(halting)) == ["says nothing of what it raises"]


def is_documented(thing: Any) -> bool:
    """Tell whether a thing has a docstring at run time: that of a value stands below it, in the source."""
    return inspect.isclass(thing) or inspect.isroutine(thing)


def problems(thing: Any) -> Iterator[str]:
    text = inspect.getdoc(thing) or ""
    if not text.partition("\n")[0].strip().endswith((".", ":")):
        yield "begins with no sentence"
    if not ELSEWHERE.search(text):
        yield from (f"says nothing of {word}" for word in arguments(thing) if not re.search(rf"\b{word}\b", text))
        if "Raises:" not in text and re.search(r"^\s+raise [A-Z]\w+\(", source(thing), re.MULTILINE):
            yield "says nothing of what it raises"


def arguments(thing: Any) -> list[str]:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return []  # nobody else raises them; what they carry is said under Attributes
    try:
        parameters = inspect.signature(thing).parameters
    except ValueError:
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters.items() if name not in {"self", "cls"} and one.kind not in kinds]


def source(thing: Any) -> str:
    return "" if inspect.isclass(thing) else inspect.getsource(thing)

"""Every public name says what its user must know: it is on the page of the API, its arguments and errors are named."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pglease
from pglease import fencing, testing
from pglease.options import Duration

ROOT = Path(__file__).resolve().parents[1]
API = (ROOT / "docs" / "api.md").read_text("utf-8")
ENTRIES = re.findall(r"^::: (pglease\.\S+)\n(?:    options: \{(?!heading)members: \[(.*)\]\})?", API, re.MULTILINE)
ELSEWHERE = re.compile(r"\bsee (there|`)|as for the class|\bas (for )?`|[Mm]ade by `", re.IGNORECASE)
"""A docstring that leaves arguments and errors to another one."""
CONTRACT = {"pglease.Backend", "pglease.Observer"}
"""Protocols: what they are called with is said where it is a class of its own."""
ENTRY = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.*(?:\n {6,}.*)*)", re.MULTILINE)
"""What a docstring says of one argument, or of several together, below `Args:`."""
POINTER = re.compile(r"\b[Aa]s (for|the attributes)\b|\bas [\w-]+ says? (it|them)\b|; see `")
IN_WORDS = {"HeartbeatManager"}
"""What a public call answers that is not on the page: its one public verb is named where it is answered."""
SOURCES = [path.read_text("utf-8") for path in (ROOT / "pglease").rglob("*.py")]
CLASSES = {name for text in SOURCES for name in re.findall(r"^class ([A-Z]\w+)", text, re.MULTILINE)}
ALIASES = {name for text in SOURCES for name in re.findall(r"^([A-Z]\w+): TypeAlias", text, re.MULTILINE)}


def found(name: str) -> Any:
    """Return what a dotted name means, also an attribute of a module that is imported when it is asked for."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def public() -> Iterator[tuple[str, Any]]:
    """Yield the public names, and the public methods and properties of the classes among them that the page shows."""
    for name, members in ENTRIES:
        thing = found(name)
        yield name, thing
        shown = members.split(", ") if f"::: {name}\n    options: {{members" in API else None
        for member, value in vars(thing).items() if inspect.isclass(thing) and name not in CONTRACT else ():
            if not member.startswith("_") and (shown is None or member in shown):
                function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
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


def test_whatever_a_public_call_answers_and_every_word_for_what_it_takes_is_on_the_page_too() -> None:
    shown = {name.rpartition(".")[2] for name, _ in ENTRIES} | IN_WORDS

    missing = {
        f"{name}: {kind}" for name, thing in public() for kind in answers(thing) | words(thing) if kind not in shown
    }

    assert missing == set()


def test_a_docstring_that_says_too_little_is_found_out() -> None:
    def silent(name: str) -> None: ...

    def halting(name: str) -> None:
        """Do something to `name`."""
        raise ValueError(name)

    def vague(span: Duration, pause: Duration | None = None, name: str = "job", other: int = 1) -> None:
        """Do something.

        Args:
            span: how long.
            pause: seconds in between.
            name: the lease.
            other: as for `silent`.
        """

    assert list(problems(silent)) == ["begins with no sentence", "says nothing of name"]
    assert list(problems(halting)) == ["says nothing of what it raises"]
    assert list(problems(vague)) == ["span has no unit", "pause has no default", "name has no default"]


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
    yield from vaguenesses(thing, text)


def vaguenesses(thing: Any, text: str) -> Iterator[str]:
    """Yield durations without a unit and defaults that are not named, of arguments that have a line of their own."""
    said = {
        name: words
        for names, words in ENTRY.findall(text.partition("Args:\n")[2].partition("\n\n")[0])
        for name in names.split(", ")
        if not POINTER.search(words)
    }
    for name, one in parameters(thing).items():
        if name in said and "Duration" in str(one.annotation) and not re.search(r"\bseconds\b", said[name]):
            yield f"{name} has no unit"
        if name in said and one.default is not inspect.Parameter.empty and "efault" not in said[name]:
            yield f"{name} has no default"


def answers(thing: Any) -> set[str]:
    """Return the classes of ours that a function returns."""
    declared = getattr(thing, "__annotations__", {}).get("return", "") if inspect.isfunction(thing) else ""
    return set(re.findall(r"\w+", str(declared))) & CLASSES


def arguments(thing: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters(thing).items() if name not in {"self", "cls"} and one.kind not in kinds]


def parameters(thing: Any) -> Mapping[str, inspect.Parameter]:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return {}  # nobody else raises them; what they carry is said under Attributes
    try:
        return inspect.signature(thing).parameters
    except (TypeError, ValueError):  # a value, or a class that says nothing of it
        return {}


def words(thing: Any) -> set[str]:
    """Return our words for types that a call takes, or a record has."""
    declared = [one.annotation for one in parameters(thing).values()] + [
        *getattr(thing, "__annotations__", {}).values()
    ]
    return set(re.findall(r"\w+", " ".join(map(str, declared)))) & ALIASES


def source(thing: Any) -> str:
    return "" if inspect.isclass(thing) else inspect.getsource(thing)

"""Change one thing in a pure module, and see a test turn red: `make mutants`.

Each mutant runs in a fork of a process that has imported pytest but nothing of ours, the tests that make up nothing
first and until one is red, so that most take less than a second. Tools that are well kept start an interpreter for
each, or leave decorated methods out, where our decisions are. Texts are not changed: what errors say is looked at by
people. Annotations and decorators decide nothing at run time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

ROOT = Path(__file__).parent.parent
PATIENCE = 60
"""Seconds of computing after which a mutant that does not end counts as noticed; ten times as many of waiting."""
NOTICED, SURVIVED = 1, 0
MODULES = {
    "term": ["tests/test_term.py", "tests/units/test_steps.py"],
    "schedule": ["tests/units/test_schedule.py"],
    "steps": ["tests/units/test_steps.py"],
    "options": ["tests/test_options.py"],
    "records": ["tests/test_records.py", "tests/test_options.py"],
    "slots": ["tests/test_slots.py"],
    "settings": ["tests/test_settings.py"],
    "bonds": ["tests/units/test_bonds.py"],
    "errors": ["tests/test_errors.py"],
    "backends.postgres_dsn": ["tests/units/test_dsn.py"],
    "backends.postgres_errors": ["tests/units/test_postgres_errors.py"],
}
"""The pure modules, and the tests that are to notice; none of them needs a server."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,  # codespell:ignore notin
    ast.NotIn: ast.In,  # codespell:ignore notin
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change.

    Attributes:
        module: below `pglease`.
        line: where.
        what: the change, in words.
        tree: the module with it.
    """

    module: str
    line: int
    what: str
    tree: ast.Module


def path_of(module: str) -> Path:
    """Return a module's file."""
    return ROOT / "pglease" / (module.replace(".", "/") + ".py")


def mutants_of(module: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    tree = ast.parse(path_of(module).read_text("utf-8"))
    number = 0
    for place, node in enumerate(_nodes(tree)):
        for variant, (what, _) in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            _, change = list(_changes(list(_nodes(changed))[place]))[variant]
            before = " ".join(ast.unparse(node).split())
            change()
            number += 1
            yield Mutant(module, getattr(node, "lineno", 0), f"{what} in `{before[:60]}`", changed)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what decides something: neither annotations nor decorators, nor what only types need."""
    for field, value in ast.iter_fields(tree):
        if field in {"annotation", "returns", "decorator_list", "bases", "keywords"} and not isinstance(tree, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_types(child):
                yield child
                yield from _nodes(child)


def _is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return "TypeAlias" in ast.unparse(node.annotation)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Assign) and "TypeVar" in ast.unparse(node.value)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what can be changed about one node, in words and in deed."""
    yield from _of_an_expression(node)
    match node:
        case ast.If() | ast.IfExp() | ast.While():
            yield "the other way", lambda: setattr(node, "test", _negated(node.test))
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            yield "returns None", lambda: setattr(node, "value", ast.copy_location(ast.Constant(None), node))
        case ast.Raise(exc=ast.expr()):
            yield "raises nothing", lambda: _become_pass(node)
        case ast.Continue():
            yield "goes on", lambda: _become_pass(node)


def _of_an_expression(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "another comparison", lambda: setattr(node, "ops", [COMPARISONS[type(op)]()])
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield "another operator", lambda: setattr(node, "op", OPERATORS[type(node.op)]())
        case ast.BoolOp():
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield "and for or", lambda: setattr(node, "op", other())
        case ast.UnaryOp(op=ast.Not()):
            yield "without its not", lambda: setattr(node, "operand", _negated(node.operand))
        case ast.Constant(value=bool(value)):
            yield "the other truth", lambda: setattr(node, "value", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "one more", lambda: setattr(node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield "another function", lambda: setattr(node.func, "id", CALLS[name])


def _negated(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _become_pass(node: Any) -> None:
    node.__class__ = ast.Pass
    for field in ("exc", "cause"):
        node.__dict__.pop(field, None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives out a mutant in place of its module; and has the quickest tests run first."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"pglease.{mutant.module}"

    def pytest_sessionstart(self) -> None:
        """Come before pytest's own finder, which would load every module of a package that brings a plugin."""
        sys.meta_path.insert(0, self)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave what makes up examples to the end: it takes a hundred times as long, and is seldom needed."""
        items.sort(key=lambda item: getattr(item.obj, "is_hypothesis_test", False))

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, path_of(self._mutant.module), loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        tree = ast.fix_missing_locations(self._mutant.tree)
        exec(compile(tree, str(path_of(self._mutant.module)), "exec"), module.__dict__)


def try_out(mutant: Mutant) -> int:
    """Run the tests on a mutant, in a fork; return its process."""
    if pid := os.fork():
        return pid
    code = NOTICED
    with contextlib.suppress(BaseException):
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)
        signal.alarm(10 * PATIENCE)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        gc.freeze()  # pytest collects garbage ten times, among the trees of all mutants
        code = NOTICED if run_tests(mutant) else SURVIVED
    os._exit(code)


def run_tests(mutant: Mutant) -> int:
    """Run the tests of a mutant's module, the same examples each time; 0 when all is well."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # how small a failure can be made is no question
    never_too_slow = [hypothesis.HealthCheck.too_slow]  # a busy machine would have noticed every mutant
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=20,
        phases=phases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=never_too_slow,
    )
    hypothesis.settings.load_profile("mutants")
    set_hypothesis_home_dir(ROOT / ".venv" / ".cache" / "hypothesis")
    plugins = ["--disable-plugin-autoload", "-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout", "--timeout", "0"]
    chosen = ["--noconftest", "-x", "-q", "-W", "ignore::pytest.PytestWarning", *plugins]
    os.chdir(ROOT)
    return int(pytest.main([*chosen, *MODULES[mutant.module]], plugins=[_Finder(mutant)]))


def hunt(mutants: list[Mutant], workers: int) -> list[Mutant]:
    """Try out all of them, a few at a time; return those that nobody noticed."""
    waiting, running, survivors = list(reversed(mutants)), dict[int, Mutant](), list[Mutant]()
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            running[try_out(mutant)] = mutant
        pid, status = os.wait()
        mutant, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code == SURVIVED:
            survivors.append(mutant)
        if code != NOTICED:
            how = "SURVIVES" if code == SURVIVED else f"DOES NOT END ({signal.Signals(-code).name})"
            print(f"{how}: pglease.{mutant.module}, line {mutant.line}: {mutant.what}", flush=True)
    return survivors


def check(module: str) -> None:
    """Refuse a module whose tests are red without any change: they would notice everything."""
    unchanged = Mutant(module, 0, "nothing", ast.parse(path_of(module).read_text("utf-8")))
    _, status = os.waitpid(try_out(unchanged), 0)
    assert os.waitstatus_to_exitcode(status) == SURVIVED, f"the tests of {module} are red as it is"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(MODULES)}; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into docs/proof.md")
    chosen = parser.parse_args()
    found, began = dict[str, Count](), time.perf_counter()
    for module in chosen.modules or MODULES:
        check(module)
        mutants = list(mutants_of(module))
        found[module] = Count(len(mutants), len(mutants) - len(hunt(mutants, chosen.workers)))
        print(found[module].told(f"`{module}`"), flush=True)
    print(f"{_all(found).told('all')}\n{time.perf_counter() - began:.0f} s")
    if chosen.write:
        from tests.stress import PAGE, today, write

        write("mutants", table(kept_in(PAGE.read_text("utf-8")) | found, today()))
    return _all(found).noticed < 0.9 * _all(found).made


class Count(NamedTuple):
    """How many mutants were made of something, and how many of them were noticed."""

    made: int
    noticed: int

    def told(self, what: str) -> str:
        """Say it as a line of the table."""
        return f"| {what} | {self.made} | {self.noticed} | {100 * self.noticed / self.made:.1f} % |"


def kept_in(page: str) -> dict[str, Count]:
    """Return what earlier runs have left in the page, for the modules that this one was not asked for."""
    figures = page.partition("figures of mutants: begin")[2].partition("figures of mutants: end")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (\d+) \| (\d+) \|", figures, re.MULTILINE)
    return {module: Count(int(made), int(noticed)) for module, made, noticed in rows if module in MODULES}


def table(found: dict[str, Count], when: str) -> str:
    """Return the figures of all modules that were ever tried, for people."""
    lines = [found[module].told(f"`{module}`") for module in MODULES if module in found]
    missing = ", ".join(f"`{module}`" for module in MODULES if module not in found)
    head = f"On {when}." + (f" Of {missing} no whole run was seen yet." if missing else "")
    return "\n".join(
        [f"{head}\n", "| module | changes | noticed | |", "|---|---|---|---|", *lines, _all(found).told("all")]
    )


def _all(found: dict[str, Count]) -> Count:
    return Count(sum(count.made for count in found.values()), sum(count.noticed for count in found.values()))


if __name__ == "__main__":
    sys.exit(main())

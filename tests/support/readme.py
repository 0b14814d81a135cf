"""What the product writes itself in README and docs: tables, a timeline. `python -m tests.support.readme` does it.

With `--demo` it plays the demo, too, and takes its words and its picture.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from pglease.backends.base import Traits
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.backends.kubernetes import KubernetesBackend
from pglease.backends.memory import MemoryBackend
from pglease.backends.postgres import PostgresBackend
from pglease.backends.redis import RedisBackend
from pglease.backends.sqlite import SQLiteBackend

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BACKENDS = ROOT / "docs" / "backends.md"
PAGES = (README, BACKENDS)
CHOOSING = ROOT / "docs" / "choosing.md"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
STORES = (
    (PostgresBackend("postgresql://localhost"), "`postgresql://…`"),
    (HybridPostgresBackend("postgresql://localhost"), "`hybrid+postgresql://…` ([page](docs/hybrid.md))"),
    (
        RedisBackend("redis://localhost"),
        "`redis://…`, `rediss://…`, `valkey://…`, `redis+sentinel://…` ([page](docs/redis.md))",
    ),
    (KubernetesBackend, "`kubernetes://namespace`"),
    (SQLiteBackend("leases.db"), "`sqlite:///file` ([page](docs/sqlite.md))"),
    (MemoryBackend(), "`memory://`"),
)


def stores() -> str:
    """Return the table of stores, printed from their traits."""
    head = "| store | address | expiry judged by | shared by | durable | but |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(_store(store.traits, address) for store, address in STORES)])


def _store(traits: Traits, address: str) -> str:
    durable = traits.durable if isinstance(traits.durable, str) else "yes" if traits.durable else "no"
    return f"| {traits.kind} | {address} | {traits.clock} | {traits.shared_by} | {durable} | {traits.caveat} |"


def traits() -> str:
    """Return the table of everything that the stores' traits say."""
    names = [field.name for field in fields(Traits) if field.name not in {"kind", "caveat"}]
    head = "| | " + " | ".join(store.traits.kind for store, _ in STORES) + " |\n|---" + "|---" * len(STORES) + "|"
    return "\n".join([head, *(_trait(name) for name in names)])


def _trait(name: str) -> str:
    said = [getattr(store.traits, name) for store, _ in STORES]
    words = ["yes" if each is True else "no" if each is False else each for each in said]
    return f"| {name.replace('_', ' ')} | {' | '.join(words)} |"


def figures() -> str:
    """Return the ratios that the last `make bench` wrote down."""
    ratios: dict[str, dict[str, str]] = {}
    _, _, section = RESULTS.read_text("utf-8").partition("## On PostgreSQL, one thread\n")
    row = r"^\| ([^|]+); flush (on|off) \| µs \|[^|]*\|[^|]*\|[^|]*\| ([\d.]+×)"
    for work, flush, ratio in re.findall(row, section.partition("\n## ")[0], re.MULTILINE):
        if not work.endswith("Unix socket"):  # the page is short
            ratios.setdefault(work, {})[flush] = ratio
    rows = [f"| {work} | {of.get('off', '')} | {of.get('on', '')} |" for work, of in ratios.items()]
    return "\n".join(["| work | WAL flush off | WAL flush on |", "|---|---|---|", *rows])


def written(text: str, **more: str) -> str:
    """Return a page with those parts as they should be, and with `more` of them."""
    for part, table in (("stores", stores()), ("traits", traits()), ("figures", figures()), *more.items()):
        text = re.sub(
            rf"(<!-- {part}:[^\n]*-->\n).*?(<!-- /{part} -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL
        )
    return text


def timeline() -> str:
    """Return the picture that the page on choosing a ttl draws."""
    names: dict[str, str] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", CHOOSING.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names["picture"]


def demo() -> str:
    """Play the demo, draw its picture, and return what it said while it played."""
    command = [sys.executable, "-m", "pglease", "demo", "--svg", str(ROOT / "docs" / "demo.svg")]
    return played(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def played(output: str) -> str:
    """Return the story from what the demo prints, without the picture and the checks below it."""
    return f"```text\n{output.partition(chr(10) * 2)[0]}\n```"


def plot(story: str) -> list[str]:
    """Return a story without what differs from one time to the next: who, when, for how long."""
    return [re.sub(r"worker-\d|-?\d+(\.\d)?", "·", line).strip() for line in story.splitlines()]


if __name__ == "__main__":
    CHOOSING.with_suffix(".svg").write_text(timeline(), "utf-8")
    more = {"demo": demo()} if "--demo" in sys.argv else {}
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8"), **more), "utf-8")

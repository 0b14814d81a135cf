"""Asserts are rewritten once: in a new clone each worker would rewrite those of every module, all at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def ahead(config: pytest.Config, folder: Path, processes: int | None = None) -> None:
    """Rewrite the tests under `folder` that are newer than what pytest keeps of them, a share on each core."""
    stale = sorted(_stale(folder), key=lambda source: source.stat().st_size)
    shares = processes or os.cpu_count() or 1
    children = [_fork(config, stale[share::shares]) for share in range(min(shares, len(stale)))]
    for child in children:
        os.waitpid(child, 0)  # one that failed has left its share to the workers


def _stale(folder: Path) -> Iterator[Path]:
    for pattern in ("test_*.py", "conftest.py"):
        for source in folder.rglob(pattern):
            kept = _kept(source)
            if not kept.exists() or kept.stat().st_mtime < source.stat().st_mtime:
                yield source


def _kept(source: Path) -> Path:
    return rewrite.get_cache_dir(source) / f"{source.stem}{rewrite.PYC_TAIL}"


def _fork(config: pytest.Config, sources: Sequence[Path]) -> int:
    child = os.fork()
    if child == 0:
        try:
            for source in sources:
                status, code = rewrite._rewrite_test(source, config)
                _kept(source).parent.mkdir(parents=True, exist_ok=True)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, _kept(source))
        finally:
            os._exit(0)
    return child

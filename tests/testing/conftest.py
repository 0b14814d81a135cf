"""Each test here finds a program in which nobody has named a store yet."""

from __future__ import annotations

import pytest

from pglease import default


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_client", None)

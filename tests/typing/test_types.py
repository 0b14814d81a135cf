"""What type checkers promise our users: mypy reads the examples beside this file, and a line that should fail must."""

from __future__ import annotations

from pathlib import Path

from mypy import api

HERE = Path(__file__).parent


def test_mypy_knows_what_every_call_returns(monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(HERE.parent.parent))  # the package beside these tests, not an installed one
    examples = sorted(str(path) for path in HERE.glob("*.py") if path.name != Path(__file__).name)

    report, trouble, code = api.run(
        [
            *examples,
            f"--config-file={HERE.parent.parent / 'pyproject.toml'}",
            "--strict",
            "--warn-unused-ignores",
            "--follow-imports=silent",
            "--no-error-summary",
        ]
    )

    assert len(examples) >= 2
    assert trouble == ""
    assert report == ""
    assert code == 0

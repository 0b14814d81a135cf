"""The pytest option that runs the published contract suite on a store of your own.

pytest --pglease-backend='mystore://host/db?prefix={}'
pytest --pglease-backend=mystore://host/db --pglease-harness=mystore.testing:MyHarness
"""

from __future__ import annotations

from pathlib import Path

import pytest

_SUITE = Path(__file__).with_name("suite_for_url.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("pglease", "the contract suite of pglease")
    group.addoption(
        "--pglease-backend",
        metavar="URL",
        help="run the contract suite of pglease on the store of this address, INSTEAD of the tests that would be "
        "collected by default. Each test needs an empty store: {} in the address becomes a word of its own (a table, a "
        "prefix, a file); without it every lease in the store is ended and deleted.",
    )
    group.addoption(
        "--pglease-harness",
        metavar="MODULE:CLASS",
        help="a pglease.testing.harness.Harness, called with the address: it lets time pass at once, breaks and mends "
        "the link, restarts the store. Default: one that can only wait, and leaves the rest out.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the suite, beside what is named on the command line."""
    if config.getoption("pglease_backend"):
        named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
        config.args = [*named, str(_SUITE)]
    elif config.getoption("pglease_harness"):
        raise pytest.UsageError("--pglease-harness goes with --pglease-backend")

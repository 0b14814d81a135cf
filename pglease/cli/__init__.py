"""The command line: `pglease`, also as `python -m pglease`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: what stands after the program's name; default: `sys.argv[1:]`.

    Returns:
        The code to exit with. It never raises for anything the user, the store or a signal did.
    """
    from pglease.cli.app import run_app

    return run_app(arguments)

"""`completion`: what a shell needs to complete commands, options and the names of leases."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import click

from pglease.cli import printing
from pglease.cli.options import examples

if TYPE_CHECKING:
    from pglease.client import PGLease

LOOK_UP = 0.3
"""Seconds a name's completion may take; a slow store completes nothing rather than making the prompt hang."""
MOST = 200

WHERE = {
    "bash": 'eval "$(pglease completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(pglease completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "pglease completion fish > ~/.config/fish/completions/pglease.fish",
}


@click.command(
    epilog=examples(
        'eval "$(pglease completion bash)"     in ~/.bashrc',
        'eval "$(pglease completion zsh)"      in ~/.zshrc, after compinit',
        "pglease completion fish > ~/.config/fish/completions/pglease.fish",
    )
)
@click.argument("shell", type=click.Choice(tuple(WHERE)))
def completion(shell: str) -> int:
    """Print the completion script for a shell.

    Names of leases are completed from the store, if it answers within 300 ms.
    """
    from click.shell_completion import get_completion_class

    from pglease.cli.app import COMPLETE_VARIABLE, app

    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - the three are click's own
        raise click.UsageError(f"no completion for {shell}")
    script = kind(app, {}, "pglease", COMPLETE_VARIABLE)
    # Not `source()`: bash's runs `bash --version` and refuses to print where there is none, as in an image being built.
    printing.say(script.source_template % script.source_vars())
    return 0


def names_in_store(ctx: click.Context, beginning: str) -> list[str]:
    """Return the names that begin so, or nothing if the store says nothing in time or at all."""
    from pglease.cli.options import address_from
    from pglease.client import PGLease

    found: list[str] = []
    try:
        leases = PGLease(address_from(ctx), connect_timeout=1, auto_initialize=False)
        import pglease.backends.postgres_psycopg  # noqa: F401  # loading the driver is not the store's time
    except Exception:  # noqa: BLE001  # a completion has nobody to tell
        return found
    finder = threading.Thread(target=_find, args=(leases, beginning, found), daemon=True)
    finder.start()
    finder.join(LOOK_UP)
    return list(found)


def _find(leases: PGLease, beginning: str, found: list[str]) -> None:
    try:
        found.extend([lease.name for lease in leases.list_leases(beginning)][:MOST])
    except Exception:  # noqa: BLE001  # a completion has nobody to tell
        return

"""`options`: what applies to a primitive of some name, and where it comes from."""

from __future__ import annotations

from typing import Any

import click

from pglease.cli import printing
from pglease.cli.options import NAME, examples, json_option
from pglease.settings import KINDS, Setting, Settings


@click.command(
    "options",
    epilog=examples(
        "pglease options cart                  of every kind",
        'pglease options cart --kind lock      of leases.lock("cart") alone',
    ),
)
@click.argument("name", type=NAME)
@click.option(
    "--kind", type=click.Choice(tuple(KINDS)), multiple=True, help="Which primitive; may be repeated. Default: all."
)
@click.option("--env-prefix", metavar="PREFIX", help="What the code says as env_prefix=, if it does.")
@json_option
def explain(*, name: str, kind: tuple[str, ...], env_prefix: str | None, as_json: bool, **_: Any) -> int:
    """Show the options of the primitive NAME as this environment sets them, and which variable would set each.

    An option comes from code, else from the variable for the name, else from the variable for its kind, else it is the
    default. What code says cannot be seen from here: it comes before all that is shown.
    """
    settings = Settings()
    for each in kind or KINDS:
        found = settings.explain(each, name, env_prefix=env_prefix)
        if as_json:
            _say_json(each, name, found)
        else:
            _say(each, name, settings, found, env_prefix)
    return 0


def _say_json(kind: str, name: str, found: list[Setting]) -> None:
    for setting in found:
        printing.say_json(
            {"kind": kind, "name": name, "option": setting.option, "value": setting.value, "source": setting.source}
        )


def _say(kind: str, name: str, settings: Settings, found: list[Setting], env_prefix: str | None) -> None:
    printing.say(f"{kind} {printing.visible(repr(name))}")
    variables = settings.variables(kind, name, env_prefix=env_prefix)
    for setting in found:
        value = "-" if setting.value is None else str(setting.value)
        source = f"default; set by {variables[setting.option][0]}" if setting.source == "default" else setting.source
        printing.say(f"  {setting.option:<9}  {printing.visible(value):<6}  {source}")

"""Options of the primitives from the environment, for a whole kind and for one name.

`PGLEASE_LOCK_TTL=120` is for every `Lock`, `PGLEASE_LOCK_CART_TTL=30` for `Lock("cart")`. What code says comes first,
then the variable for the name, then the one for the kind, then the default. Only what the client's methods build reads
them (`leases.lock("cart")`); a client reads the environment once, when it builds its first primitive.

In a variable, a name's lower-case ASCII letters and digits are written in upper case, and every other character as its
UTF-8 bytes in hexadecimal between underscores: `order:42` is `ORDER_3A_42`, `Cart` is `_43_ART`. So no two names share
a variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pglease.errors import ConfigurationError

PREFIX = "PGLEASE_"
_PLAIN = re.compile("[a-z0-9]")
_SWITCH = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}


def _text(value: str) -> str:
    return value


def _flag(value: str) -> bool:
    try:
        return _SWITCH[value.strip().lower()]
    except KeyError:
        raise ConfigurationError(f"must be one of {', '.join(_SWITCH)}, not {value!r}") from None


def _number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"must be a whole number, not {value!r}") from None


_HOLD: dict[str, Callable[[str], Any]] = {"ttl": _text, "max_hold": _text, "on_lost": _text}
KINDS: dict[str, dict[str, Callable[[str], Any]]] = {
    "lock": {**_HOLD, "min_hold": _text, "heartbeat": _flag, "fair": _flag, "reentrant": _flag},
    "task_lock": {**_HOLD, "min_hold": _text, "heartbeat": _flag, "once_per": _text},
    "leader_election": {"ttl": _text, "defer": _text},
    "read_write_lock": _HOLD,
    "semaphore": {**_HOLD, "min_hold": _text, "fair": _flag, "limit": _number},
}
"""What may be set, by the name of the client's method."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of one primitive, and where it comes from.

    Attributes:
        option: its name.
        value: what applies, as it was written; None for the default of the class.
        source: `code`, the variable's name, or `default`.
    """

    option: str
    value: Any
    source: str


def in_a_variable(name: str) -> str:
    """Return a lease's name as it stands in a variable."""
    return "".join(c.upper() if _PLAIN.match(c) else f"_{c.encode().hex().upper()}_" for c in name)


class Settings:
    """What the environment says, read once: a lock is built for each request, and most applications set nothing.

    Args:
        environment: default: the process's, as it is now.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        ours = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
        self._kinds = {kind: _beginning_with(f"{PREFIX}{kind.upper()}_", ours) for kind in KINDS}

    def apply(self, kind: str, name: str, given: Mapping[str, Any], **positional: Any) -> dict[str, Any]:
        """Return the options that apply: those given in code, and what the environment adds.

        Args:
            kind: one of `KINDS`.
            name: the primitive's.
            given: keyword arguments.
            positional: arguments that were not given if they are None.

        Raises:
            ConfigurationError: a variable says what cannot be read; the text names it.
        """
        found = {**given, **{option: value for option, value in positional.items() if value is not None}}
        if self._kinds[kind]:
            for setting in self.explain(kind, name, found):
                if setting.source not in ("code", "default"):
                    found[setting.option] = setting.value
        return found

    def explain(self, kind: str, name: str, given: Mapping[str, Any] | None = None) -> list[Setting]:
        """Return, for each option of a kind, what applies to `name` and where it comes from."""
        return _settings(kind, name, given or {}, self._kinds[kind])


def _beginning_with(beginning: str, variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(beginning)}


def _settings(kind: str, name: str, given: Mapping[str, Any], variables: Mapping[str, str]) -> list[Setting]:
    wide = f"{PREFIX}{kind.upper()}_"
    own = f"{wide}{in_a_variable(str(name))}_"  # what is no name is refused later, by its rule
    return [_setting(option, read, given, variables, (own, wide)) for option, read in KINDS[kind].items()]


def _setting(
    option: str,
    read: Callable[[str], Any],
    given: Mapping[str, Any],
    variables: Mapping[str, str],
    beginnings: tuple[str, ...],
) -> Setting:
    if option in given:
        return Setting(option, given[option], "code")
    for beginning in beginnings:
        variable = beginning + option.upper()
        if variable in variables:
            try:
                return Setting(option, read(variables[variable]), variable)
            except ConfigurationError as error:
                raise ConfigurationError(f"{variable} {error}") from None
    return Setting(option, None, "default")

"""Options of the primitives from the environment, for a whole kind and for one name.

`PGLEASE_LOCK_TTL=120` is for every `Lock`, `PGLEASE_LOCK_CART_TTL=30` for `Lock("cart")`. What code says comes first,
then the variable for the name, then the one for the kind, then the default. Only what the client's methods build reads
them (`leases.lock("cart")`); a client reads the environment once, when it builds its first primitive.

In a variable, a name's lower-case ASCII letters and digits are written in upper case, and every other character as its
UTF-8 bytes in hexadecimal between underscores: `order:42` is `ORDER_3A_42`, `Cart` is `_43_ART`. So no two names share
a variable. With `env_prefix="SHOP_CART_"` the variable for the name is `SHOP_CART_TTL` instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from pglease import options
from pglease.errors import ConfigurationError
from pglease.slots import once_per as slots_of

PREFIX = "PGLEASE_"
_PLAIN = re.compile("[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SWITCH = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}

Reader: TypeAlias = Callable[[str, str], Any]
"""Reads a value; the second argument is the variable, for the error."""


def _duration(value: str, variable: str) -> str:
    options.seconds(value, variable)
    return value


def _pause(value: str, variable: str) -> str:
    options.seconds(value, variable, zero=True)
    return value


def _flag(value: str, variable: str) -> bool:
    try:
        return _SWITCH[value.strip().lower()]
    except KeyError:
        raise ConfigurationError(f"{variable} must be one of {', '.join(_SWITCH)}, not {value!r}") from None


def _limit(value: str, variable: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigurationError(f"{variable} must be a whole number, not {value!r}") from None
    return options.limit(number, variable)


def _on_lost(value: str, variable: str) -> str:
    return options.choice(value, variable, get_args(options.OnLost))


def _on_loss(value: str, variable: str) -> str:
    return options.choice(value, variable, get_args(options.OnLoss))


def _once_per(value: str, variable: str) -> str:
    try:
        slots_of(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{variable}: {error}") from None
    return value


_HOLD: dict[str, Reader] = {"ttl": _duration, "max_hold": _duration, "on_lost": _on_lost}
KINDS: dict[str, dict[str, Reader]] = {
    "lock": {**_HOLD, "min_hold": _pause, "heartbeat": _flag, "fair": _flag, "reentrant": _flag},
    "task_lock": {**_HOLD, "min_hold": _pause, "heartbeat": _flag, "once_per": _once_per},
    "leader_election": {"ttl": _duration, "defer": _pause, "on_lost": _on_loss},
    "read_write_lock": _HOLD,
    "semaphore": {**_HOLD, "min_hold": _pause, "fair": _flag, "limit": _limit},
}
"""What may be set, by the name of the client's method."""


_WIDE = {kind: f"{PREFIX}{kind.upper()}_" for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of one primitive, and where it comes from.

    Attributes:
        option: its name.
        value: what applies, as it was written; None where nothing was said and there is no default.
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
        self._environment = os.environ if environment is None else environment
        self._read: dict[str, dict[str, str]] = {}
        for kind in KINDS:
            self._beginning_with(_WIDE[kind])

    def apply(
        self, kind: str, name: str, given: Mapping[str, Any], *, env_prefix: str | None = None, **positional: Any
    ) -> dict[str, Any]:
        """Return the options that apply: those given in code, and what the environment adds.

        Args:
            kind: one of `KINDS`.
            name: the primitive's.
            given: keyword arguments, `env_prefix` perhaps among them.
            env_prefix: what the variables for this name begin with.
            positional: arguments that were not given if they are None.

        Raises:
            ConfigurationError: a variable says what cannot be read, or no variable can begin like that.
        """
        found = {**given}
        found |= {option: value for option, value in positional.items() if value is not None}
        env_prefix = found.pop("env_prefix", env_prefix)
        if env_prefix is not None or self._read[_WIDE[kind]]:
            for setting in self._said(kind, name, found, env_prefix):
                found[setting.option] = setting.value
        return found

    def explain(
        self, kind: str, name: str, given: Mapping[str, Any] | None = None, *, env_prefix: str | None = None
    ) -> list[Setting]:
        """Return, for each option of a kind, what applies to `name` and where it comes from."""
        from pglease.primitives.configs import KINDS as CONFIGS
        from pglease.primitives.configs import defaults

        code = {option: Setting(option, value, "code") for option, value in (given or {}).items()}
        said = {setting.option: setting for setting in self._said(kind, name, code, env_prefix)}
        otherwise = defaults(CONFIGS[kind])
        return [
            code.get(option) or said.get(option) or Setting(option, otherwise.get(option), "default")
            for option in KINDS[kind]
        ]

    def variables(self, kind: str, name: str, *, env_prefix: str | None = None) -> dict[str, tuple[str, str]]:
        """Return, for each option of a kind, the variable for `name` and the one for all."""
        own, wide = _own(kind, name, env_prefix), _WIDE[kind]
        return {option: (own + option.upper(), wide + option.upper()) for option in KINDS[kind]}

    def _said(self, kind: str, name: str, given: Mapping[str, Any], env_prefix: str | None) -> Iterator[Setting]:
        """Yield what the environment says about that which code leaves open."""
        wide, own = _WIDE[kind], _own(kind, name, env_prefix)
        variables = self._read[wide] | (self._beginning_with(own) if env_prefix is not None else {})
        for option, read in KINDS[kind].items():
            for variable in () if option in given else (own + option.upper(), wide + option.upper()):
                if variable in variables:
                    yield Setting(option, read(variables[variable], variable), variable)
                    break

    def _beginning_with(self, beginning: str) -> dict[str, str]:
        if beginning not in self._read:
            found = {name: value for name, value in self._environment.items() if name.startswith(beginning)}
            self._read[beginning] = found
        return self._read[beginning]


def _own(kind: str, name: str, env_prefix: str | None) -> str:
    """Return what the variables for a name begin with; what is no name is refused later, by its rule."""
    if env_prefix is None:
        return f"{_WIDE[kind]}{in_a_variable(str(name))}_"
    if not _PREFIX.match(str(env_prefix)):
        raise ConfigurationError(f"env_prefix must be letters, digits and underscores, not {env_prefix!r}")
    return env_prefix

"""One statement of ours, as each driver wants its parameters written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pglease.errors import ConfigurationError

_PARAMETER = re.compile(r"%\((\w+)\)s")
_WRITTEN = {
    "pyformat": "%({name})s",
    "named": ":{name}",
    "format": "%s",
    "qmark": "?",
    "numeric": ":{number}",
    "numeric_dollar": "${number}",
}


def written(
    sql: str, values: Mapping[str, Any], style: str, start: int = 1
) -> tuple[str, Mapping[str, Any] | Sequence[Any]]:
    """Return a statement of ours and its parameters as a driver of that style takes them."""
    text, order = _form(sql, style, start)
    return text, values if order is None else [values[name] for name in order]


class Statement:
    """One statement that is sent often, in the form of each driver; a form is made once.

    Args:
        sql: with `%(name)s` for its parameters, and no other `%`.

    Attributes:
        encoded: it, for psycopg, which would encode and hash a long text anew for each call.
    """

    __slots__ = ("_forms", "_sql", "encoded")

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self.encoded: Final = sql.encode()
        self._forms: dict[str, tuple[str, list[str] | None]] = {}

    def written(self, style: str, values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | Sequence[Any]]:
        """Return text and parameters in a driver's style."""
        form = self._forms.get(style)
        if form is None:
            form = self._forms[style] = _form(self._sql, style, 1)
        text, order = form
        return text, values if order is None else [values[name] for name in order]


def _form(sql: str, style: str, start: int) -> tuple[str, list[str] | None]:
    """Return a statement in one style, and the order of its parameters; None where they go by name."""
    if style not in _WRITTEN:
        raise ConfigurationError(f"paramstyle must be one of {', '.join(_WRITTEN)}, not {style!r}")
    if style == "pyformat":
        return sql, None
    if style == "named":
        return _PARAMETER.sub(r":\1", sql), None
    every = _PARAMETER.findall(sql)
    if style in ("format", "qmark"):
        return _PARAMETER.sub(_WRITTEN[style], sql), every
    order = list(dict.fromkeys(every))
    return _PARAMETER.sub(lambda found: _WRITTEN[style].format(number=start + order.index(found[1])), sql), order

"""One statement of ours, as each driver wants its parameters written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    if style not in _WRITTEN:
        raise ConfigurationError(f"paramstyle must be one of {', '.join(_WRITTEN)}, not {style!r}")
    if style == "pyformat":
        return sql, values
    if style == "named":
        return _PARAMETER.sub(r":\1", sql), values
    if style in ("format", "qmark"):
        order = _PARAMETER.findall(sql)
        return _PARAMETER.sub(_WRITTEN[style], sql), [values[name] for name in order]
    order = list(dict.fromkeys(_PARAMETER.findall(sql)))
    numbered = _PARAMETER.sub(lambda found: _WRITTEN[style].format(number=start + order.index(found[1])), sql)
    return numbered, [values[name] for name in order]

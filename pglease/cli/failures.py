"""Every way a command can end badly, as one sentence and one exit code; no traceback, no password."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pglease.exits import EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable

CONFLICT = 75
"""EX_TEMPFAIL: another holder has it, or the wait ran out."""
LOST = EXIT_CODE
"""The lease was lost while the command ran."""
OUR_FAILURE = 125
"""pglease itself failed: no store, no rights, bad configuration. As `timeout`, `env` and `nice` have it."""
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

_IN_URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^/?#\s:]*):(?P<password>\S*)@")
_AS_PARAMETER = re.compile(
    r"(?P<key>\b(?:ssl)?password\s*=\s*)(?P<password>'(?:[^'\\]|\\.)*'?|[^\s&'\"]+)", re.IGNORECASE
)


class CommandError(Exception):
    """A command ends with this sentence on standard error and this exit code."""

    def __init__(self, sentence: str, code: int = OUR_FAILURE) -> None:
        super().__init__(sentence)
        self.code = code


def sentence(error: BaseException) -> str:
    """Return what an error of ours says; for a stranger's, what and where it was, so that it can be reported."""
    from pglease.errors import PgleaseError

    text = " ".join(str(error).split())
    if isinstance(error, PgleaseError | CommandError):
        return text
    return f"unexpected trouble, please report it: {type(error).__name__}: {text} ({_place(error)})"


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def scrub(text: str, sources: Iterable[str]) -> str:
    """Replace passwords: those of the given connection strings wherever they stand, and whatever looks like one.

    The library keeps passwords out of its messages; this is the second net, for drivers, for malformed connection
    strings, and for one that was typed where a name belongs.
    """
    for secret in sorted({found for source in sources for found in _passwords(source)}, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = _IN_URL.sub(r"\g<scheme>\g<user>:***@", text)
    return _AS_PARAMETER.sub(r"\g<key>***", text)


def _passwords(source: str) -> set[str]:
    found = {match["password"] for match in _IN_URL.finditer(source)}
    found |= {match["password"].strip("'") for match in _AS_PARAMETER.finditer(source)}
    found |= {unquote(each) for each in found}
    return {each for each in found if len(each) >= 3}  # shorter ones would blot out half of any sentence

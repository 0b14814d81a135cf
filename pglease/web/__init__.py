"""Who holds what, as pages for a browser: what `pglease web` serves, for other programs to mount or to serve.

Written on the server, kept up to date by EventSource, readable without a script. Needs the extra `web`.
"""

from __future__ import annotations

from pglease.errors import MissingDependencyError

try:
    import jinja2 as _jinja2  # noqa: F401
    import starlette as _starlette  # noqa: F401
except ModuleNotFoundError as _missing:
    raise MissingDependencyError(
        f"the web page needs the package {_missing.name}: install the extra, pglease[web]"
    ) from None

from pglease.web.app import web_app

__all__ = ["web_app"]

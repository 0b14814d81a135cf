"""The pages and the streams of news that keep them up to date, as a Starlette application."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pglease import clock, options
from pglease.aio import AsyncPGLease
from pglease.cli import printing
from pglease.client import PGLease
from pglease.errors import BackendError, BackendUnavailable, ConfigurationError
from pglease.options import Duration
from pglease.timeline import WORDS
from pglease.web import views
from pglease.web.gate import Access, Gate
from pglease.web.lookout import Lookout, View

SILENCE = 15.0
"""Seconds after which a stream without news says that it is there."""
MADE = 100
"""So many pages of one look are kept for whoever else asks for the same."""
LONGEST_FORM = 10_000
"""Bytes; a name has at most 255 characters."""

_TOKEN = re.compile("[0-9]{1,19}")

Endpoint = Callable[[Request], Awaitable[Response]]
Page = views.Overview | views.Record
Asked = tuple[str, ...]
"""What a page is about: `all`, a search and the states that are shown; or `one` and a name."""


def web_app(
    leases: PGLease,
    *,
    prefix: str = "",
    every: Duration = 1.0,
    access_token: str | None = None,
    allow_force_release: bool = False,
    hosts: Collection[str] = (),
) -> Starlette:
    """Return an application that shows who holds what. It may be mounted in another one.

    It asks the store at most once a tick for all its readers together, and nothing while there are none: for the
    leases, for the queues, and, when a hold began or ended, for the history. A store without an answer is told of
    above what it said last.

    Args:
        leases: who asks. A store that does not answer is waited for as long as its `connect_timeout` says.
        prefix: only leases whose names begin with it.
        every: seconds between two looks; default 1. On Redis each look walks over the whole database.
        access_token: what each reader has to show once; at least 16 characters. Default None: everybody may read.
        allow_force_release: whether readers may end holds. Default False. It takes an access token.
        hosts: names by which it is reached, besides `localhost` and addresses in numbers.

    Raises:
        ConfigurationError: for every broken rule.
    """
    with options.all_problems() as problems:
        beginning = problems.check(options.prefix, prefix)
        tick = problems.check(options.seconds, every, "every")
        access = None if access_token is None else problems.check(Access, access_token)
        if allow_force_release and access_token is None:
            problems.note("allow_force_release takes an access_token")
    pages = _Pages(leases, Lookout(AsyncPGLease(leases), beginning, tick), access, force=allow_force_release)
    app = Starlette(routes=pages.routes(), lifespan=pages.lifespan, middleware=[Middleware(Gate, hosts=hosts)])
    app.state.lookout = pages.lookout
    return app


class _Pages:
    """The endpoints. All addresses are relative, so that it does not matter where they are mounted."""

    def __init__(self, leases: PGLease, lookout: Lookout, access: Access | None, *, force: bool) -> None:
        self.lookout = lookout
        self._leases = AsyncPGLease(leases)
        self._access, self._force = access, force
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("pglease.web"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"visible": printing.visible, "duration": printing.duration}
        self._templates.globals |= {"ENDS": WORDS, "SHOWN": views.SHOWN}

    def routes(self) -> list[Route | Mount]:
        """Return where each of them is."""
        return [
            Route("/", self._for_readers(self.overview)),
            Route("/lease", self._for_readers(self.record)),
            Route("/events", self._for_readers(self.events)),
            Route("/force-release", self._for_readers(self.force_release), methods=["POST"]),
            Route("/sign-in", self.sign_in, methods=["GET", "POST"]),
            Mount("/static", StaticFiles(packages=[("pglease.web", "static")])),
        ]

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Send the last readers away at the end."""
        yield
        self.lookout.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    async def overview(self, request: Request) -> Response:
        """Show all leases, or those that were asked for."""
        asked = _asked(request)
        page = await self._seen(asked, await self.lookout.now())
        _, search, shown = asked
        events = "events?" + urlencode({"q": search, "show": shown})
        return self._page("overview.html", page, search=search, shown=shown, events=events)

    async def record(self, request: Request) -> Response:
        """Show one lease."""
        name = request.query_params.get("name", "")
        return self._lease(await self._record(name, await self.lookout.now()))

    async def events(self, request: Request) -> Response:
        """Send a page's changing part, now and whenever there is news."""
        name = request.query_params.get("name")
        asked = _asked(request) if name is None else ("one", name)
        return StreamingResponse(self.stream(asked), media_type="text/event-stream")

    async def stream(self, asked: Asked) -> AsyncIterator[str]:
        """Yield what an EventSource reads, until this server ends."""
        yield "retry: 2000\n\n"
        told, spoke_at = None, clock.now()
        view: View | None = await self.lookout.now()
        while view is not None:
            page = await self._seen(asked, view)
            if page != told:
                told, spoke_at = page, clock.now()
                yield self._news(asked, page, view)
            elif clock.now() - spoke_at > SILENCE:
                spoke_at = clock.now()
                yield ": nothing new\n\n"
            view = await self.lookout.after(view.number)

    async def _seen(self, asked: Asked, view: View) -> Page:
        """Return what is asked for, as it is in a view."""
        kind, *words = asked
        page: Page | None = view.made.get(asked)
        if page is None:
            page = views.overview(view, *words) if kind == "all" else await self._record(words[0], view)
            if len(view.made) >= MADE:
                view.made.clear()
            view.made[asked] = page
        return page

    async def _record(self, name: str, view: View) -> views.Record:
        lease = view.leases.get(name)
        return views.record(view, name, await self.lookout.history(lease) if lease else ())

    def _news(self, asked: Asked, page: Page, view: View) -> str:
        """Return the event by which a page that was seen in a view is told."""
        written = ("written", *asked)
        if written not in view.made:
            template = "overview_live.html" if isinstance(page, views.Overview) else "lease_live.html"
            text = self._templates.get_template(template).render(page=page, **self._forms())
            view.made[written] = _event("page", text)
        news: str = view.made[written]
        return news

    # -- changing ------------------------------------------------------------------------------------------------------

    async def force_release(self, request: Request) -> Response:
        """End the hold that the reader has seen, and no other."""
        form = await _form(request)
        if self._access is None or not self._force:
            return self._message(403, "This page is for reading", "It was started without --allow-force-release.")
        if not self._access.sealed(request, form.get("seal", "")):
            return self._message(
                403, "Nothing was changed", "This form is not from a page of ours; open the lease anew."
            )
        name, token = form.get("name", ""), form.get("fencing_token", "")
        if not name.startswith(self.lookout.prefix) or not _TOKEN.fullmatch(token):
            return self._message(400, "Nothing was changed", "The form does not name a hold that could be ended here.")
        try:
            ended = await self._leases.force_release(name, int(token))
        except ConfigurationError as error:
            return self._message(400, "Nothing was changed", str(error))
        except BackendError as error:
            unknown = isinstance(error, BackendUnavailable) and error.outcome_unknown
            title = "It is not known whether the hold was ended" if unknown else "Nothing was changed"
            return self._message(503, title, str(error))
        self.lookout.turn()
        page = await self._record(name, await self.lookout.now())
        return self._lease(page, status=200 if ended else 409, ended=ended, token=token)

    # -- coming in -----------------------------------------------------------------------------------------------------

    async def sign_in(self, request: Request) -> Response:
        """Ask for the access token, and know whoever has shown it."""
        form = request.query_params if request.method == "GET" else await _form(request)
        token, access = form.get("token"), self._access
        if access is None or (token is not None and access.opens(token)):
            response = RedirectResponse("./", 303)
            if access is not None:
                access.admit(request, response)
            return response
        return self._html("sign_in.html", 401 if token is not None else 200, wrong=token is not None)

    def _for_readers(self, endpoint: Endpoint) -> Endpoint:
        """Serve those alone who have shown the access token, where there is one."""

        @functools.wraps(endpoint)
        async def guarded(request: Request) -> Response:
            if self._access is None or self._access.knows(request):
                return await endpoint(request)
            if request.method == "GET" and request.headers.get("accept", "").startswith("text/html"):
                return RedirectResponse("sign-in", 303)
            return PlainTextResponse("sign in first\n", 401)

        return guarded

    # -- writing -------------------------------------------------------------------------------------------------------

    def _lease(
        self, page: views.Record, *, status: int | None = None, ended: bool | None = None, token: str = ""
    ) -> Response:
        found = 200 if page.row or page.status.trouble else 404
        return self._page("lease.html", page, status or found, ended=ended, token=token)

    def _page(self, template: str, page: Page, status: int = 200, **more: Any) -> Response:
        return self._html(template, status, page=page, **self._forms(), **more)

    def _forms(self) -> dict[str, Any]:
        return {"force": self._force, "seal": self._access.seal if self._access else ""}

    def _message(self, status: int, title: str, text: str) -> Response:
        return self._html("message.html", status, title=title, text=text)

    def _html(self, template: str, status: int, **facts: Any) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(**facts), status)


def _asked(request: Request) -> Asked:
    shown = request.query_params.get("show", "all")
    return "all", request.query_params.get("q", "").strip(), shown if shown in views.SHOWN else "all"


async def _form(request: Request) -> dict[str, str]:
    """Read what a form sent; nothing of one that is longer than any of ours."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_FORM:
            return {}
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def _event(kind: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"event: {kind}\n{lines}\n"

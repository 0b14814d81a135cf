"""What the pages show, read as a browser without scripts reads them."""

from __future__ import annotations

import html
import importlib
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from pglease import ConfigurationError, PGLease, clock
from pglease.backends.base import Budget
from pglease.errors import MissingDependencyError
from pglease.records import Request, Ticket
from pglease.testing.fake_clock import FakeClock
from pglease.web import web_app
from tests.web.conftest import TOKEN, Store


class Reader(HTMLParser):
    """Collects the text of a page, and notes what does not close what it opened."""

    VOID = frozenset({"meta", "link", "input", "br", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if not self.open or self.open[-1] not in {"style", "script"}:
            self.words += data.split()


def words(text: str) -> str:
    return " ".join(Reader(text).words)


def queue_up(store, name, label):
    ticket = Ticket(name, f"{abs(hash(label)):032x}"[-32:], label, 600.0)
    assert store.queue(ticket, Budget.of(5, clock.now)) is not None


def test_the_first_page_shows_who_holds_what_who_queues_and_the_picture(browse, worker, store):
    worker.try_acquire("daily-report", ttl="10m")
    queue_up(store, "daily-report", "worker-2")
    queue_up(store, "daily-report", "worker-3")
    with worker.acquire("import", ttl="10m"):
        pass

    page = browse().get("/")

    said = words(page.text)
    assert page.status_code == 200
    assert "1 held · 1 free" in said
    assert "daily-report held worker-1 1 0.0 s 0.0 s" in said
    assert "2: worker-2 , …" in said
    assert "import free last: worker-1 1" in said
    assert "daily-report, token 1: worker-1 from" in said  # the picture, in words


@pytest.mark.parametrize("address", ["/", "/?q=nothing-like-it", "/lease?name=job", "/lease?name=unknown", "/sign-in"])
def test_every_page_is_well_formed_with_each_id_once(operator, worker, address):
    worker.try_acquire("job", metadata={"pod": "a"})

    read = Reader(operator.get(address, follow_redirects=False).text)

    assert (read.open, read.wrong) == ([], [])
    assert len(read.ids) == len(set(read.ids))


def test_a_hold_that_is_late_and_one_that_ran_out_are_told_apart(leases):
    its_clock = FakeClock()
    store = Store(clock=its_clock, history=3)
    for name, ttl in (("late", 100.0), ("over", 10.0)):
        store.try_acquire(Request(name, "w", "0" * 32, ttl), Budget.of(5, clock.now))
    its_clock.advance(60)

    with PGLease(store) as client, TestClient(web_app(client), base_url="http://localhost") as browser:
        said = words(browser.get("/").text)
        late = words(browser.get("/?show=late").text)

    assert "1 held, 1 of them late · 1 free, 1 of them ran out" in said
    assert "late held, late w" in said
    assert "over ran out last: w" in said
    assert "over ran out" not in late


def test_a_search_finds_names_holders_and_metadata_and_draws_those_alone(browse, worker):
    worker.try_acquire("Shop:Daily")
    worker.try_acquire("import:7", metadata={"pod": "worker-abc"})
    browser = browse()

    assert "import:7" not in browser.get("/?q=shop:d").text
    assert "Shop:Daily" not in browser.get("/?q=ABC").text
    assert "import:7" in browser.get("/?q=ABC").text
    assert "Shop:Daily" in browser.get("/?q=worker-1&show=held").text
    assert "No lease is like that" in browser.get("/?q=nobody").text


def test_the_page_of_a_lease_shows_its_record_its_queue_and_its_history(browse, worker, store):
    for _ in range(2):
        with worker.acquire("a/b & c?"):
            pass
    worker.try_acquire("a/b & c?", metadata={"address": "10.0.0.7"})
    queue_up(store, "a/b & c?", "worker-2")
    browser = browse()

    link = re.search(r'href="(lease\?name=[^"]*)"', browser.get("/").text)
    page = browser.get("/" + html.unescape(link[1]))

    said = words(page.text)
    assert page.status_code == 200
    assert "State held Holder worker-1 Fencing token 3" in said
    assert "Changed hands 2 times" in said
    assert '"address": "10.0.0.7"' in said
    assert "Who queues for it worker-2" in said
    assert re.search(r"3 worker-1 .* still held 2 worker-1 .* released 1 worker-1 .* released", said)
    assert "Who held a/b & c?, and when" in said


def test_a_lease_that_nobody_has_taken_yet_is_not_found_and_said_so(browse):
    page = browse().get("/lease?name=unknown")

    assert page.status_code == 404
    assert "The store knows no lease by this name" in page.text


def test_names_and_labels_are_text_and_nothing_else(browse, store, leases):
    evil = '<script>alert(1)</script>"\u202e'
    with PGLease(store, owner_id="<b>&</b>") as client:
        client.try_acquire(evil, metadata={"<i>": "</pre><script>\u2028"})
        browser = browse()
        pages = browser.get("/").text + browser.get("/lease", params={"name": evil}).text

    assert "<script>alert" not in pages
    assert "<b>" not in pages
    assert "<i>" not in pages
    assert pages.count("<script") == 2  # our own, on each page
    assert not {"\u202e", "\u2028"} & set(pages)
    assert "\\u202e" in pages


def test_of_too_many_leases_the_rest_is_counted(browse, worker, monkeypatch):
    monkeypatch.setattr("pglease.web.views.ROWS", 2)
    for number in range(5):
        worker.try_acquire(f"job:{number}")

    assert "and 3 more" in words(browse().get("/").text)


def test_only_leases_of_the_prefix_are_shown(browse, worker):
    worker.try_acquire("shop:a")
    worker.try_acquire("bank:a")
    browser = browse(prefix="shop:")

    assert "bank:a" not in browser.get("/").text
    assert browser.get("/lease?name=bank:a").status_code == 404


def test_a_store_that_is_silent_is_a_banner_above_what_it_said_last_until_it_answers(browse, worker, store):
    worker.try_acquire("job")
    browser = browse()
    before = browser.get("/").text

    store.fall_silent("no answer from <b>postgres</b>")
    meanwhile = browser.get("/")
    store.answer_again()
    after = browser.get("/").text

    assert "does not answer" not in before + after
    assert meanwhile.status_code == 200
    assert re.search(
        r"The store does not answer , .*: no answer from <b>postgres</b>\. Below is what it said at \d\d:\d\d:\d\d UTC",
        words(meanwhile.text),
    )
    assert "job held worker-1" in words(meanwhile.text)


def test_a_store_that_was_silent_from_the_first_is_a_banner_too(browse, store):
    store.fall_silent()

    said = words(browse().get("/").text)

    assert "It has not told of anything yet" in said
    assert "Nobody has taken a lease" not in said


def test_what_may_not_be_read_is_told_and_the_rest_is_shown(browse, worker, store):
    worker.try_acquire("job")
    store.refuse("history", "permission denied for table pglease_leases_history")
    store.refuse("queues", "permission denied for table pglease_leases_tickets")

    said = words(browse().get("/").text)

    assert "job held worker-1" in said
    assert "past holds cannot be read: permission denied for table pglease_leases_history" in said
    assert "who queues cannot be read: permission denied for table pglease_leases_tickets" in said
    assert "job, token 1: worker-1 from" in said


def test_a_store_without_history_and_queues_shows_the_last_hold_of_each(browse, worker, store):
    store.traits = replace(store.traits, fair=False, history=False)
    with worker.acquire("over"):
        pass
    worker.try_acquire("job")
    browser = browse()

    said, record = words(browser.get("/").text), words(browser.get("/lease?name=job").text)

    assert store.asked["queues"] == store.asked["history"] == 0
    assert "job, token 1: worker-1 from" in said
    assert "over, token 1: worker-1 from" in said
    assert "1 worker-1" in record
    assert "still held" in record


def test_it_works_mounted_in_another_application(leases, worker):
    worker.try_acquire("job")
    app = Starlette(routes=[Mount("/ops/leases", web_app(leases, access_token=TOKEN))])

    with TestClient(app, base_url="http://localhost", headers={"accept": "text/html"}) as browser:
        asked = browser.get("/ops/leases/")
        page = browser.post("/ops/leases/sign-in", data={"token": TOKEN})

        assert asked.url.path == "/ops/leases/sign-in"
        assert page.url.path == "/ops/leases/"
        assert "job held" in words(page.text)
        assert browser.get("/ops/leases/lease?name=job").status_code == 200
        assert browser.get("/ops/leases/static/web.css").status_code == 200


def test_no_page_asks_for_anything_elsewhere(operator, worker):
    worker.try_acquire("job")

    pages = "".join(operator.get(each).text for each in ("/", "/lease?name=job", "/static/web.js", "/static/web.css"))

    addresses = re.findall(r"""(?:src|href|action|url)\s*[=(]\s*["']?([^"'\s>)]*)""", pages)
    assert addresses
    assert [each for each in addresses if each.startswith(("/", "http:", "https:", "data:"))] == []
    assert set(re.findall(r"https?://[^\s\"']*", pages)) == {"http://www.w3.org/2000/svg"}


def test_every_broken_option_is_told_at_once(leases):
    with pytest.raises(ConfigurationError) as broken:
        web_app(leases, every=0, access_token="short", allow_force_release=True)

    assert "every" in str(broken.value)
    assert "at least 16 characters" in str(broken.value)
    with pytest.raises(ConfigurationError, match="takes an access_token"):
        web_app(leases, allow_force_release=True)


def test_without_the_extra_it_says_which_one_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pglease.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(MissingDependencyError, match=r"jinja2: install the extra, pglease\[web\]"):
        importlib.import_module("pglease.web")

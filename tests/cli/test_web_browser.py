"""`web` in a real browser: renders, is brought up to date, filters, shuts nobody out, and complains of nothing."""

from urllib.parse import urlsplit

import pytest

from pglease import PGLease
from tests.support import screenshot
from tests.support.browser import chromium

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.xdist_group("chromium")]

STATES = "[...document.querySelectorAll('#leases tbody tr')].map(row => row.innerText.replace(/\\s+/g, ' '))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def serve(start):
    """Start the pages; returns their address."""

    def begin(*options, **started):
        return start("web", "--listen", "127.0.0.1:0", "--every", "0.1s", *options, **started).stdout.readline().strip()

    return begin


@pytest.fixture
def open_page(browser):
    """Open an address; at the end nothing was complained of, and nothing was asked of anybody else."""
    opened = []

    def go(address, **look):
        page = browser.page(**look)
        opened.append((page, urlsplit(address).netloc))
        page.go(address)
        return page

    yield go
    for page, place in opened:
        assert page.complaints == []
        assert {urlsplit(each).netloc for each in page.requested} == {place}


def test_a_hand_over_is_seen_without_loading_anything_and_a_search_filters_as_one_types(serve, leases, open_page, dsn):
    leases.try_acquire("daily-report", ttl="10m")
    leases.try_acquire("import:7", ttl="10m")
    page = open_page(serve())
    page.see("window.same = true")

    assert "daily-report held somebody-else" in page.see(STATES)[0]
    leases.release("daily-report")
    page.until(f"{STATES}.some(row => row.startsWith('daily-report free last: somebody-else'))")
    with PGLease(dsn, owner_id="the next one") as successor:
        successor.try_acquire("daily-report", ttl="10m")
        page.until(f"{STATES}.some(row => row.startsWith('daily-report held the next one'))")
        page.press("/")
        for letter in "NEXT":
            page.press(letter)
        page.until(f"{STATES}.length === 1")

    assert page.see("location.search").startswith("?q=NEXT")
    assert page.see("window.same")


def test_the_picture_in_the_documentation_can_be_drawn_anew(browser, tmp_path):
    screenshot.draw(browser, tmp_path / "web.png")

    drawn, printed = (tmp_path / "web.png").read_bytes(), screenshot.PICTURE.read_bytes()
    assert drawn[:20] == printed[:20]  # a PNG, as wide; how high it is depends on a machine's fonts


def test_seconds_go_on_between_two_news(serve, leases, open_page):
    leases.try_acquire("daily-report", ttl="10m")
    page = open_page(serve())

    left = "document.querySelector('[data-left]').textContent"
    before = page.see(left)
    page.until(f"{left} !== '{before}'")
    page.until("document.querySelector('meter').value < 599.5")


def test_a_page_that_nobody_sees_is_told_nothing_until_somebody_does(serve, leases, open_page):
    page = open_page(serve())
    page.wait_for_request("/events")
    seen = (
        "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )

    page.see(seen.format("true"))
    leases.try_acquire("daily-report", ttl="10m")
    assert page.see(STATES) == []
    page.see(seen.format("false"))
    page.until(f"{STATES}.length === 1")

    assert [urlsplit(each).path for each in page.requested].count("/events") == 2


def test_keys_lead_to_a_lease_and_back(serve, leases, open_page):
    leases.try_acquire("a", ttl="10m")
    leases.try_acquire("b/c?&", ttl="10m", metadata={"pod": "a-1"})
    page = open_page(serve())

    page.press("j")
    page.press("j")
    leases.renew("a")  # the table is drawn anew, and the focus stays where it is
    page.until("document.activeElement.dataset.key === 'b/c?&'")
    with page.loading():
        page.press("Enter", 13)
    assert page.see("document.querySelector('h1').innerText") == "b/c?&"
    assert '"pod": "a-1"' in page.text()
    with page.loading():
        page.press("u")
    assert page.see("location.pathname") == "/"
    page.press("?")
    page.until("document.getElementById('keys').open")


def test_without_a_script_it_can_be_read_and_searched(serve, leases, open_page):
    leases.try_acquire("daily-report", ttl="10m")
    leases.try_acquire("import:7", ttl="10m")
    page = open_page(serve(), script=False)

    assert "load it again to see what is new" in page.text()
    assert page.see("getComputedStyle(document.getElementById('keys')).display") == "none"
    page.click("#q")
    for letter in "daily":
        page.press(letter)
    with page.loading():
        page.click("#search button")
    assert len(page.see(STATES)) == 1
    with page.loading():
        page.click("#leases a")
    assert "Fencing token" in page.text()


def test_a_store_that_is_away_is_a_banner_until_it_is_back(serve, leases, open_page, proxy, behind_proxy):
    leases.try_acquire("daily-report", ttl="10m")
    page = open_page(serve(env=behind_proxy))
    trouble = "document.getElementById('trouble').innerText.trim()"

    proxy.refuse()
    proxy.cut()
    page.until(f"{trouble}.startsWith('The store does not answer')")
    assert page.see(STATES)[0].startswith("daily-report held")
    assert page.barriers() == []
    proxy.pass_through()
    page.until(f"{trouble} === ''")


def test_an_operator_ends_the_hold_that_was_looked_at(serve, leases, open_page, dsn):
    leases.try_acquire("daily-report", ttl="10m")
    page = open_page(serve("--allow-force-release"))
    with page.loading():
        page.click("#leases a")

    page.click("#force summary")
    leases.release("daily-report")
    with PGLease(dsn, owner_id="the next one") as successor:
        successor.try_acquire("daily-report", ttl="10m")
        page.until("document.getElementById('record').innerText.includes('the next one')")
        assert page.see("document.querySelector('#force button').innerText") == "End the hold with token 1"
        with page.loading():
            page.click("#force button")
        assert "Nothing was changed: the hold with token 1 is no longer the present one" in page.text()
        assert not successor.get_lease("daily-report").is_expired()
        page.complaints.clear()  # of the answer 409, which is what is wanted

        page.click("#force summary")
        with page.loading():
            page.click("#force button")
        assert "The hold with token 2 was ended" in page.text()
        assert successor.get_lease("daily-report").is_expired()


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        (360, True),
        pytest.param(1280, True, marks=pytest.mark.long),
        pytest.param(360, False, marks=pytest.mark.long),
    ],
)
def test_everybody_can_use_it_on_a_desk_and_in_a_hand_in_light_and_in_dark(
    serve, leases, open_page, dsn, sql, tmp_path, width, dark
):
    with PGLease(f"{dsn}?pglease.history=9", owner_id="worker-1") as worker:
        for _ in range(3):
            worker.try_acquire("shop:" + "long-" * 6 + "import", ttl="10m", metadata={"pod": "worker-7f9c"})
            worker.release("shop:" + "long-" * 6 + "import")
    leases.try_acquire("shop:" + "long-" * 6 + "import", ttl="10m", metadata={"pod": "worker-7f9c"})
    leases.try_acquire("shop:over", ttl="10m", heartbeat=False)
    sql("UPDATE pglease_leases SET expires_at = clock_timestamp() WHERE task_name = 'shop:over'")
    address = serve("--allow-force-release")
    page = open_page(address.partition("sign-in")[0], width=width, dark=dark)
    assert page.see("document.querySelector('h1').innerText") == "Sign in"
    assert page.barriers() == []
    page.go(address)
    page.until(f"{STATES}.some(row => row.startsWith('shop:over ran out'))")

    for place in ("overview", "lease"):
        assert page.barriers() == []
        assert page.see("document.documentElement.scrollWidth <= innerWidth")
        ground = page.see("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        page.picture(tmp_path / f"{place}.png")
        if place == "overview":
            with page.loading():
                page.click("#leases a")
            page.click("#force summary")

"""Who is let in, and who may end a hold."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from starlette.requests import HTTPConnection
from starlette.responses import Response

from pglease import PGLease
from pglease.web.gate import Access, comes_from_here, is_loopback
from tests.web.conftest import TOKEN


def seal_of(page) -> str:
    return re.search(r'name="seal" value="([0-9a-f]+)"', page.text)[1]


def token_of(page) -> str:
    return re.search(r'name="fencing_token" value="(\d+)"', page.text)[1]


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:9910", "[::1]:9910", "192.168.1.7", "LeaSes.internal:80"]
)
def test_a_host_that_nobody_else_can_point_here_is_served(browse, host):
    assert browse(hosts=["leases.internal"]).get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9910", "", "[::1", "a@localhost.evil"]
)
def test_a_name_that_somebody_elses_dns_could_point_here_is_refused(browse, host):
    browser = browse()

    for path in ("/", "/events", "/sign-in", "/static/web.js"):
        assert browser.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("path", ["/", "/lease?name=none", "/sign-in", "/static/web.js", "/nowhere"])
def test_every_answer_tells_the_browser_to_be_strict(operator, path):
    headers = operator.get(path, follow_redirects=False).headers

    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["form-action"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_the_pictures_style_and_no_other_is_allowed_and_nothing_is_written_into_attributes(operator, worker):
    worker.try_acquire("job")
    page = operator.get("/lease?name=job")

    (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.headers["content-security-policy"]
    assert not re.search(r"\s(style|on\w+)=", page.text)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page.text) == [""]


def test_by_default_everybody_may_read_and_nobody_may_end_a_hold(browse, worker, store):
    worker.try_acquire("job")
    browser = browse()

    page = browser.get("/lease?name=job")
    answer = browser.post("/force-release", data={"name": "job", "fencing_token": "1", "seal": ""})

    assert "force-release" not in page.text
    assert answer.status_code == 403
    assert store.asked["force_release"] == 0
    assert worker.held("job").held


def test_with_a_token_alone_nobody_may_end_a_hold(browse, worker, store, monkeypatch):
    monkeypatch.setattr(Access, "sealed", lambda *_: True)
    worker.try_acquire("job")
    browser = browse(access_token=TOKEN)
    page = browser.get("/sign-in", params={"token": TOKEN})

    assert "job" in page.text
    assert browser.post("/force-release", data={"name": "job", "fencing_token": "1"}).status_code == 403
    assert store.asked["force_release"] == 0


def test_without_the_access_token_nothing_can_be_read(browse, worker):
    worker.try_acquire("job")
    browser = browse(access_token=TOKEN)

    page = browser.get("/")
    wrong = browser.post("/sign-in", data={"token": "not-the-token-at-all"})

    assert page.url.path == "/sign-in"
    assert "job" not in page.text
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    assert browser.get("/events", headers={"accept": "text/event-stream"}).status_code == 401
    assert browser.get("/", headers={"cookie": "pglease=" + TOKEN}).url.path == "/sign-in"
    assert browser.get("/", headers={"cookie": "pglease=ü".encode()}).url.path == "/sign-in"
    assert browser.post("/force-release", data={"name": "job", "fencing_token": "1"}).status_code == 401


def test_the_cookie_is_for_no_script_and_no_other_site_and_tells_not_the_token(browse):
    answer = browse(access_token=TOKEN).get("/sign-in", params={"token": TOKEN}, follow_redirects=False)

    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 303
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie


def test_an_operator_ends_the_hold_that_was_shown(operator, worker, store):
    worker.try_acquire("job", ttl="10m")
    page = operator.get("/lease?name=job")

    form = {"name": "job", "fencing_token": token_of(page), "seal": seal_of(page)}
    answer = operator.post("/force-release", data=form, headers={"origin": "http://127.0.0.1:9910"})

    assert answer.status_code == 200
    assert "The hold with token 1 was ended" in answer.text
    assert "ended by an operator" in answer.text
    assert worker.get_lease("job").is_expired()


def test_a_hold_that_was_succeeded_meanwhile_is_left_alone(operator, worker, store):
    worker.try_acquire("job", ttl="10m")
    page = operator.get("/lease?name=job")
    worker.release("job")
    with PGLease(store, owner_id="the next one") as successor:
        successor.try_acquire("job", ttl="10m")

        form = {"name": "job", "fencing_token": token_of(page), "seal": seal_of(page)}
        answer = operator.post("/force-release", data=form)

        assert answer.status_code == 409
        assert "the hold with token 1 is no longer the present one" in answer.text
        assert "the next one" in answer.text
        assert successor.held("job").held
        assert not worker.get_lease("job").is_expired()


@pytest.mark.parametrize(
    ("headers", "form"),
    [
        ({"origin": "http://evil.example"}, {}),
        ({"origin": "http://127.0.0.1:8000"}, {}),
        ({"origin": "null"}, {}),
        ({"sec-fetch-site": "cross-site"}, {}),
        ({"sec-fetch-site": "same-site"}, {}),
        ({}, {"seal": "0" * 64}),
        ({}, {"seal": ""}),
        ({}, {"seal": "ü"}),
    ],
)
def test_a_form_of_somebody_elses_page_changes_nothing(operator, worker, store, headers, form):
    worker.try_acquire("job", ttl="10m")
    page = operator.get("/lease?name=job")

    sent = {"name": "job", "fencing_token": token_of(page), "seal": seal_of(page), **form}
    answer = operator.post("/force-release", data=sent, headers=headers)

    assert answer.status_code == 403
    assert store.asked["force_release"] == 0
    assert not worker.get_lease("job").is_expired()


@pytest.mark.parametrize(
    "form",
    [
        {"fencing_token": "one"},
        {"fencing_token": "-1"},
        {"fencing_token": "²"},
        {"fencing_token": "0"},
        {"fencing_token": "9" * 5000},
        {"name": ""},
        {"name": "x" * 300},
        {"name": "job\n"},
    ],
)
def test_a_form_that_names_no_hold_is_refused_with_a_sentence(operator, worker, form):
    worker.try_acquire("job", ttl="10m")
    seal = seal_of(operator.get("/lease?name=job"))

    answer = operator.post("/force-release", data={"name": "job", "fencing_token": "1", "seal": seal, **form})

    assert answer.status_code == 400
    assert not worker.get_lease("job").is_expired()


def test_a_form_of_any_length_is_read_up_to_a_bound(operator, worker):
    answer = operator.post("/force-release", content=b"name=" + b"x" * 1_000_000)

    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("unknown", "said"), [(True, "It is not known whether the hold was ended"), (False, "Nothing was changed")]
)
def test_of_a_store_that_is_silent_it_is_told_whether_the_hold_may_have_ended(operator, worker, store, unknown, said):
    worker.try_acquire("job", ttl="10m")
    page = operator.get("/lease?name=job")
    store.fall_silent(outcome_unknown=unknown)

    form = {"name": "job", "fencing_token": token_of(page), "seal": seal_of(page)}
    answer = operator.post("/force-release", data=form)

    assert answer.status_code == 503
    assert said in answer.text


def test_holds_outside_the_prefix_cannot_be_ended(browse, worker):
    worker.try_acquire("shop:a", ttl="10m")
    worker.try_acquire("bank:a", ttl="10m")
    browser = browse(access_token=TOKEN, allow_force_release=True, prefix="shop:")
    browser.get("/sign-in", params={"token": TOKEN})
    seal = seal_of(browser.get("/lease?name=shop:a"))

    answer = browser.post("/force-release", data={"name": "bank:a", "fencing_token": "1", "seal": seal})

    assert answer.status_code == 400
    assert not worker.get_lease("bank:a").is_expired()


def test_the_cookie_is_sent_encrypted_alone_where_the_page_is():
    access, response = Access(TOKEN), Response()
    scope = {"type": "http", "scheme": "https", "path": "/", "server": ("a", 443), "headers": [], "query_string": b""}
    access.admit(HTTPConnection(scope), response)

    assert "Secure" in response.headers["set-cookie"]


def test_a_browser_that_says_nothing_of_where_it_comes_from_needs_the_seal_alone():
    scope = {"type": "http", "headers": [(b"host", b"a")]}

    assert comes_from_here(HTTPConnection(scope))


@pytest.mark.parametrize(
    ("host", "near"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("here", False)],
)
def test_what_only_this_machine_reaches_is_known(host, near):
    assert is_loopback(host) is near

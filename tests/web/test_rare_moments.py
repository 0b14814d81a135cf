"""Pages of which many are looked at, and that nobody has to sign in to."""

from __future__ import annotations

from pglease.web import app as pages
from pglease.web import lookout


def test_only_so_much_that_was_made_of_one_look_is_kept(browse, worker, monkeypatch):
    monkeypatch.setattr(pages, "MADE", 1)
    monkeypatch.setattr(lookout, "PASTS", 1)
    browser = browse(every=3600)
    for name in ("a", "b"):
        assert worker.try_acquire(name)

    for name in ("a", "b", "a"):
        assert "worker-1" in browser.get("/", params={"q": name}).text
        assert "worker-1" in browser.get("/lease", params={"name": name}).text


def test_where_no_token_is_asked_for_signing_in_leads_to_the_pages(browse):
    answer = browse().post("/sign-in", data={"token": "any"}, follow_redirects=False)

    assert answer.status_code == 303
    assert "set-cookie" not in answer.headers

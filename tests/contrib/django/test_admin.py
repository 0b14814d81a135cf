"""The leases in Django's admin: to look at, and to end a hold whose holder does not."""

from __future__ import annotations

import html
import re

import pytest

from pglease import PGLease
from tests.support import django_site
from tests.support.worlds import delete, execute, expire, is_free, steal

# One migrated database for all of these, in which each begins without leases.
pytestmark = [pytest.mark.xdist_group("django-admin"), pytest.mark.matrix]
LIST = "/admin/pglease/lease/"


@pytest.fixture(scope="module")
def site(server):
    with server.database() as name:
        dsn = server.dsn(name)
        with django_site.default_database(dsn):
            from django.contrib.auth.models import Permission, User
            from django.core.management import call_command

            call_command("migrate", verbosity=0)
            User.objects.create_superuser("root", password="")
            for who, codes in {"viewer": ["view_lease"], "operator": ["view_lease", "delete_lease"]}.items():
                user = User.objects.create_user(who, is_staff=True)
                user.user_permissions.set(Permission.objects.filter(codename__in=codes))
            yield dsn


@pytest.fixture
def here(site):
    """The database, without any leases."""
    from pglease.contrib.django import pglease

    pglease.close()
    execute(site, "DELETE FROM pglease_leases")
    return site


@pytest.fixture
def browser(here):
    """A browser in which somebody is logged in."""
    from django.contrib.auth.models import User
    from django.test import Client

    def of(name: str) -> Client:
        client = Client()
        client.force_login(User.objects.get(username=name))
        return client

    return of


@pytest.fixture
def holder(here):
    with PGLease(here, owner_id="worker-7") as client:
        yield client


def text(page) -> str:
    assert page.status_code == 200
    return html.unescape(page.content.decode())


def confirmed(client, page):
    """Press the button of the page that asks for confirmation."""
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.content.decode())
    form: dict[str, list[str]] = {}
    for name, value in fields:
        form.setdefault(name, []).append(html.unescape(value))
    return text(client.post(LIST, form, follow=True))


def asked(client, *names):
    """Choose names in the list, and the action."""
    return client.post(LIST, {"action": "force_release", "_selected_action": names, "index": "0"})


def test_the_list_tells_who_holds_what(browser, holder, here) -> None:
    for name in ("held", "lapsed", "given back"):
        assert holder.try_acquire(name, heartbeat=False)
    holder.release("given back")
    expire(here, "lapsed")

    page = text(browser("viewer").get(LIST))

    shown = re.findall(r'class="field-task_name"><a [^>]*>([^<]*)</a></th><td class="field-state">(\w+)</td>', page)
    assert dict(shown) == {"held": "held", "lapsed": "expired", "given back": "released"}
    assert "worker-7" in page
    for state in ("held", "expired", "released"):
        assert len(re.findall('class="field-state"', text(browser("viewer").get(LIST, {"state": state})))) == 1


def test_it_is_searched_by_name_and_by_holder(browser, holder) -> None:
    assert holder.try_acquire("import:acme")
    assert holder.try_acquire("report")

    assert "import:acme" in text(browser("viewer").get(LIST, {"q": "acme"}))
    assert "report" not in text(browser("viewer").get(LIST, {"q": "acme"}))
    assert "report" in text(browser("viewer").get(LIST, {"q": "worker-7"}))


def test_any_name_can_be_looked_at(browser, holder) -> None:
    from urllib.parse import quote

    from django.contrib.admin.utils import quote as admin_quote

    name = "a/b?c=d&é_\"<script>'"
    assert holder.try_acquire(name, metadata={"pod": "blue-1"})

    page = text(browser("viewer").get(f"{LIST}{quote(admin_quote(name))}/change/"))

    assert name in page
    assert "blue-1" in page


@pytest.mark.parametrize("who", ["operator", "root"])
def test_nobody_can_add_change_or_delete_a_row(browser, holder, who, here) -> None:
    assert holder.try_acquire("job")
    client = browser(who)

    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(f"{LIST}job/change/", {"owner_id": "me"}).status_code == 403
    assert client.post(f"{LIST}job/delete/", {"post": "yes"}).status_code == 403
    client.post(LIST, {"action": "delete_selected", "_selected_action": ["job"], "post": "yes"})

    assert execute(here, "SELECT owner_id FROM pglease_leases") == [("worker-7",)]


def test_who_may_only_look_is_offered_no_force(browser, holder, here) -> None:
    assert holder.try_acquire("job")

    assert "Force release" not in text(browser("viewer").get(LIST))
    asked(browser("viewer"), "job")
    browser("viewer").post(LIST, {"action": "force_release", "_selected_action": ["job"], "hold": ["1:job"]})

    assert not is_free(here, "job")


def test_an_operator_ends_a_hold_after_being_asked(browser, holder, here) -> None:
    from django.contrib.admin.models import LogEntry

    assert holder.try_acquire("job")
    assert holder.try_acquire("left alone")
    operator = browser("operator")

    question = asked(operator, "job")
    assert not is_free(here, "job")
    assert "worker-7, token 1" in text(question)
    said = confirmed(operator, question)

    assert "The hold of 'job' with token 1 was ended" in said
    assert is_free(here, "job")
    assert not is_free(here, "left alone")
    assert str(LogEntry.objects.latest("action_time").user) == "operator"


def test_a_successor_of_the_hold_that_was_seen_is_left_alone(browser, holder, here) -> None:
    assert holder.try_acquire("job", heartbeat=False)
    operator = browser("operator")
    question = asked(operator, "job")
    steal(here, "job", "successor")

    said = confirmed(operator, question)

    assert "'job' is not held under token 1 any more" in said
    assert not is_free(here, "job")


def test_what_is_not_held_needs_no_force(browser, holder) -> None:
    assert holder.try_acquire("job")
    assert holder.release("job")

    client = browser("operator")
    asked(client, "job")

    assert "None of these is held." in text(client.get(LIST))


def test_a_name_that_is_gone_meanwhile_is_nothing_to_end(browser, holder, here) -> None:
    assert holder.try_acquire("job", heartbeat=False)
    operator = browser("operator")
    question = asked(operator, "job")
    delete(here, "job")

    confirmed(operator, question)

    assert execute(here, "SELECT count(*) FROM pglease_leases") == [(0,)]


def test_a_worker_that_was_killed_is_removed_by_an_operator_and_the_task_goes_on(browser, holder, here) -> None:
    """Instead of an hour of waiting for a ttl that was guessed for the longest task."""
    from pglease.contrib.django import pglease

    assert holder.try_acquire("import", ttl=3600, heartbeat=False)

    operator = browser("operator")
    confirmed(operator, asked(operator, "import"))

    with pglease.acquire("import") as lease:
        assert lease

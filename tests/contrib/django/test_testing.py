"""A project's own tests, under Django's runner, with leases in the test database."""

from __future__ import annotations

import pytest

from tests.contrib.django.conftest import Project
from tests.support import django_site

TESTS = """
from django.db import connection
from django.test import TestCase
from django.test.runner import DiscoverRunner
from pglease.contrib.django import guarded, pglease
from shop.models import Item

class Runner(DiscoverRunner):
    def teardown_databases(self, old_config, **kwargs):
        pglease.close()
        super().teardown_databases(old_config, **kwargs)

class ItemTest(TestCase):
    def test_an_item_is_written_under_a_lease(self):
        with pglease.acquire("items") as lease, guarded(lease):
            Item.objects.create(body="mine")
        self.assertEqual(Item.objects.count(), 1)
        self.assertTrue(connection.settings_dict["NAME"].startswith("test_"))
"""


@pytest.fixture
def tested(project: Project, admin_dsn: str) -> Project:
    project.write("shop/tests.py", TESTS)
    project.environment["DATABASE"] = django_site.as_json(admin_dsn)  # somebody who may create a test database
    return project


def test_leases_are_in_the_test_database_which_can_be_dropped_once_they_are_closed(tested: Project) -> None:
    said = tested.manage("test", "--testrunner", "shop.tests.Runner", "--noinput", "-v0")

    assert "Ran 1 test" in said
    assert "OK" in said

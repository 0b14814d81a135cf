"""One Django for this process: it can be set up only once, so all tests that need one share these settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

_ALIASES = itertools.count()
APPS = ["contenttypes", "auth", "sessions", "messages", "admin"]


def set_up() -> None:
    """Set Django up, if nobody has: with its admin, and with our app; without a database."""
    import django
    from django.conf import settings

    if settings.configured:
        return
    settings.configure(
        INSTALLED_APPS=[*(f"django.contrib.{app}" for app in APPS), "pglease.contrib.django"],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        ROOT_URLCONF="tests.support.django_urls",
        SECRET_KEY="of no use",
        ALLOWED_HOSTS=["testserver"],
        STATIC_URL="static/",
        USE_TZ=True,
        PGLEASE={},
    )
    django.setup()


def database(dsn: str, **options: Any) -> dict[str, Any]:
    """An entry of DATABASES; `options` are its OPTIONS."""
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    known = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{setting: str(info[part]) for setting, part in known.items() if part in info},
        "OPTIONS": options,
    }


def as_json(dsn: str) -> str:
    """The same for a process of its own."""
    return json.dumps(database(dsn))


def alias(dsn: str) -> str:
    """Make a database known to Django, and return the name it has there."""
    set_up()
    from django.db import connections
    from django.db.utils import ConnectionHandler

    name = f"other_{next(_ALIASES)}"
    connections.settings[name] = ConnectionHandler({"default": database(dsn)}).settings["default"]
    return name


@contextmanager
def default_database(dsn: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[None]:
    """Let `default` be a database, with nothing left open of it at the end."""
    set_up()
    from django.db import connections
    from django.db.utils import ConnectionHandler

    from pglease.contrib.django import pglease

    handler = ConnectionHandler({"default": {**database(dsn, **options), **(settings or {})}})
    before, connections.settings["default"] = connections.settings["default"], handler.settings["default"]
    connections["default"] = connections.create_connection("default")
    try:
        yield
    finally:
        pglease.close()
        connections["default"].close()
        connections["default"].close_pool()
        connections.settings["default"] = before
        del connections["default"]


@contextmanager
def lite() -> Iterator[str]:
    """The alias of a database that is no PostgreSQL."""
    set_up()
    from django.db import connections
    from django.db.utils import ConnectionHandler

    handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
    connections.settings["lite"] = handler.settings["default"]
    connections["lite"] = connections.create_connection("lite")
    try:
        yield "lite"
    finally:
        if connections["lite"].connection is not None:
            connections["lite"].connection.close()  # Django's own `close` leaves what is in memory open
        del connections["lite"], connections.settings["lite"]


def report_model() -> Any:
    """A model of nobody's app, with a new table in the default database."""
    from django.apps import apps
    from django.db import connection, models

    if "report" in apps.all_models["papers"]:
        model: Any = apps.all_models["papers"]["report"]
    else:

        class Report(models.Model):
            id = models.BigAutoField(primary_key=True)
            body = models.TextField()

            class Meta:
                app_label = "papers"

        model = Report
    with connection.schema_editor() as editor:
        editor.create_model(model)
    return model

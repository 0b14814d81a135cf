"""The least that a project needs; the two lines about pglease are at the end."""

import os
from urllib.parse import unquote, urlsplit

url = urlsplit(os.environ["DATABASE_URL"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.path[1:],
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": url.hostname or "",
        "PORT": url.port or "",
    }
}
SECRET_KEY = os.environ.get("SECRET_KEY", "for the example alone")
USE_TZ = True

INSTALLED_APPS = ["pglease.contrib.django", "reports"]
PGLEASE = {"TTL": "30s"}

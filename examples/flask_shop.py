"""A shop whose clean-up runs once at a time, in however many workers, preloaded and forked.

DATABASE_URL=postgresql://me@db/app gunicorn --chdir examples --preload --workers 2 flask_shop:app
DATABASE_URL=postgresql://me@db/app flask --app examples/flask_shop.py pglease list
"""

import os

from flask import Flask, request

from pglease.contrib.flask import PGLeaseExtension

leases = PGLeaseExtension()


def create_app() -> Flask:
    shop = Flask(__name__)
    shop.config.from_prefixed_env()  # FLASK_PGLEASE_DSN and its like; without it DATABASE_URL
    leases.init_app(shop)

    @shop.post("/tasks/cleanup")
    def cleanup() -> dict[str, str | int]:
        with leases.client.acquire("cleanup", ttl="1m") as lease:
            if not lease:
                return {"status": "skipped", "by": os.getpid()}
            lease.lost.wait(request.args.get("seconds", 3.0, type=float))  # stands for work that ends when it is lost
            return {"status": "completed", "by": os.getpid()}

    # The client is not closed in teardown_appcontext: that runs after every request.
    return shop


app = create_app()

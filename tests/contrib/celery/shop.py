"""The example's application and more tasks under leases, for real workers and beats.

`celery -A tests.contrib.celery.shop worker`; the broker is also where tasks tell what they do.
"""

from __future__ import annotations

import os
import time

import redis
from celery import shared_task

from examples.celery_import import BROKER, app
from pglease import adopt, current_lease, default_client
from pglease.contrib.celery import LeaseTask, leased

app.set_default()
app.conf.update(
    worker_prefetch_multiplier=1,
    beat_schedule={"tick": {"task": "tick", "schedule": 0.5, "options": {"queue": "ticks"}}},
)

if "SHOP_WORKER" in os.environ:  # before the pool is forked
    default_client().try_acquire("held by the parent", ttl=60)


def note(key: str) -> int:
    """Tell the test that this child has come here, and how many have."""
    with redis.Redis.from_url(BROKER) as broker:
        number: int = broker.rpush(key, os.getpid())
        return number


def facts() -> dict[str, object]:
    """Tell what the running code is under."""
    lease = current_lease()
    assert lease is not None
    assert lease.held
    return {"name": lease.name, "token": lease.fencing_token, "metadata": dict(lease.metadata), "pid": os.getpid()}


@app.task(base=LeaseTask, lease="skip:{tenant}", lease_ttl="30s")
def skipping(tenant):
    return facts()


@app.task(base=LeaseTask, bind=True, lease="retry:{0}", lease_ttl="5s", lease_on_conflict="retry", max_retries=None)
def retrying(self, tenant):
    return {**facts(), "retries": self.request.retries}


@app.task(base=LeaseTask, lease="raise:{0}", lease_on_conflict="raise")
def raising(tenant):
    return facts()


@shared_task
@leased("decorated:{tenant}")
def decorated(tenant):
    return facts()


@app.task(
    base=LeaseTask,
    lease="mortal",
    lease_ttl="4s",
    max_retries=None,
    acks_late=True,
    reject_on_worker_lost=True,
)
def mortal():
    if note("mortal") == 1:
        time.sleep(3600)
    return facts()


@app.task
def adopting(handover):
    with adopt(handover) as lease:
        return facts() if lease else None


@app.task
def forked():
    leases = default_client()
    return {
        "owner": leases.owner_id,
        "held": leases.held("held by the parent") is not None,
        "got": leases.try_acquire("held by the parent"),
        "own": leases.try_acquire("held by a child") and leases.release("held by a child"),
    }


@app.task(name="tick")
def tick():
    """What a beat sends; nobody works on it."""

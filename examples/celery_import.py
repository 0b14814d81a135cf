"""Imports in Celery's workers, one at a time for each tenant, whoever asks for them and however often.

    BROKER_URL=redis://localhost DATABASE_URL=postgresql://me@db/app celery -A celery_import worker
    BROKER_URL=redis://localhost DATABASE_URL=postgresql://me@db/app python celery_import.py acme

Whoever asks takes the lease and hands it to the task, so that nobody imports between the question and the answer. Where
an import is under way, it says so at once.
"""

import os
import sys

from celery import Celery

from pglease import PGLease, current_lease
from pglease.contrib.celery import LeaseTask

BROKER = os.environ["BROKER_URL"]

leases = PGLease(os.environ["DATABASE_URL"])  # connects at its first use, in each pool child anew
app = Celery("imports", broker=BROKER, backend=BROKER)
app.conf.broker_connection_retry_on_startup = True


@app.task(
    name="import_tenant",
    base=LeaseTask,
    lease="import:{tenant}",
    lease_ttl="1m",
    lease_on_conflict="retry",
    max_retries=None,
    acks_late=True,  # if the child is killed, the message comes again, and waits for the dead child's lease to lapse
    reject_on_worker_lost=True,
    leases=leases,
)
def import_tenant(tenant: str) -> str:
    """Import one tenant; the token goes with all that is written."""
    return f"{tenant} was imported under fencing token {current_lease().fencing_token}"


def main(tenant: str) -> None:
    """Ask for an import and wait for it, unless one is under way."""
    with leases.acquire(f"import:{tenant}", ttl="30s") as lease:
        if not lease:
            sys.exit(f"{lease.held_by} has been importing {tenant} since {lease.lease.acquired_at:%H:%M:%S}")
        handover = lease.transfer("celery", ttl="10m")  # how long the message may lie in the queue
        result = import_tenant.apply_async((tenant,), handover=handover)
    print(result.get(timeout=600))


if __name__ == "__main__":
    main(*sys.argv[1:2])

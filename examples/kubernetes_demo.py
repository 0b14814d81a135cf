"""A Deployment with several replicas, one of which works. When its pod stops in order, another goes on within a moment.

Give the pod its name through the downward API (HOSTNAME is it by default), DATABASE_URL from a Secret, and a
terminationGracePeriodSeconds longer than one turn takes. A pod that dies without a word is replaced after the ttl.
"""

import os
import signal
import sys
import threading

from pglease import AcquisitionError, PGLease

TTL = 30
stop = threading.Event()


def work(turn: int, token: int) -> None:
    """Do one turn. Write the fencing token along with the result, so that the database can refuse a smaller one."""
    print(f"turn {turn} under fencing token {token}", flush=True)


def lead(leases: PGLease, turns: int, pause: float) -> None:
    """Wait for the lease, work while it is held, give it back."""
    with leases.acquire("kubernetes-demo", ttl=TTL, raise_on_failure=True, wait=5) as lease:
        print(f"{lease.owner_id} leads", flush=True)
        for turn in range(turns):
            if stop.is_set() or not lease.held:
                break
            work(turn, lease.fencing_token)
            stop.wait(pause)
        else:
            stop.set()  # all turns are done


def main(turns: int = sys.maxsize, pause: float = 5) -> None:
    """Compete until Kubernetes sends SIGTERM, which it does before it removes a pod."""
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pod = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME")
    with PGLease(os.environ["DATABASE_URL"], owner_id=pod) as leases:
        while not stop.is_set():
            try:
                lead(leases, turns, pause)
            except AcquisitionError as busy:
                print(f"{pod} stands by, {busy.held_by} leads", flush=True)
    print(f"{pod} stopped in order", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3]))

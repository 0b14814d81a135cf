"""One process of a crowd on one lease file: take, prove that nobody else is in, give back; over and over.

    python crowd.py FILE NAME GRANTS SECONDS

Ends after so many grants of its own, not before so many seconds.

Whoever is in holds an exclusive `flock` on a file beside it; a second holder would not get that. Prints the tokens it
was granted, and whatever error reached it.
"""

from __future__ import annotations

import fcntl
import random
import sys
import time
from pathlib import Path

from pglease import PGLease, clock


def main(path: str, name: str, grants: str, seconds: str) -> None:
    began, taken = clock.now(), 0
    with PGLease(f"sqlite:///{path}") as leases, Path(f"{path}.inside").open("wb") as inside:
        while taken < int(grants) or clock.now() < began + float(seconds):
            with leases.acquire(name, ttl=600) as lease:
                if lease:
                    taken += 1
                    fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    print(lease.fencing_token, f"{clock.now():.9f}", flush=True)
                    fcntl.flock(inside, fcntl.LOCK_UN)
            time.sleep(random.uniform(0, 0.02))
            leases.get_lease(name)


if __name__ == "__main__":
    main(*sys.argv[1:])

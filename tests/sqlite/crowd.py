"""One process of a crowd on one lease file: take, prove that nobody else is in, give back; over and over.

    python crowd.py FILE NAME SECONDS

Whoever is in holds an exclusive `flock` on a file beside it; a second holder would not get that. Prints the tokens it
was granted, and whatever error reached it.
"""

from __future__ import annotations

import fcntl
import random
import sys
from pathlib import Path

from pglease import PGLease, clock


def main(path: str, name: str, seconds: str) -> None:
    until = clock.now() + float(seconds)
    with PGLease(f"sqlite:///{path}") as leases, Path(f"{path}.inside").open("wb") as inside:
        while clock.now() < until:
            with leases.acquire(name, ttl=30, wait=30) as lease:
                if lease:
                    fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    print(lease.fencing_token, f"{clock.now():.9f}", flush=True)
                    fcntl.flock(inside, fcntl.LOCK_UN)
            if random.random() < 0.1:
                leases.get_lease(name)


if __name__ == "__main__":
    main(*sys.argv[1:])

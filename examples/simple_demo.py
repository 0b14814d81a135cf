"""Run this in two terminals: one of them does the work, the other says who does.

    DATABASE_URL=postgresql://me@localhost/test python simple_demo.py

Stop the first and run the second again.
"""

import sys
import time

from pglease import PGLease


def main(seconds: float = 10) -> None:
    """Hold the lease for a while, or say who holds it."""
    with PGLease.from_env() as leases, leases.acquire("simple-demo", ttl=30) as lease:
        if not lease:
            print(f"{lease.held_by} is at work; ask again in {lease.retry_after:.0f} s at the latest")
            return
        print(f"I am {lease.owner_id}, my fencing token is {lease.fencing_token}")
        end = time.monotonic() + seconds
        while (
            lease.held and time.monotonic() < end
        ):  # the lease is renewed behind the scenes, for as long as this takes
            print(f"working; {lease.remaining():.0f} s of trust left without another renewal")
            time.sleep(min(1, seconds))
    print("done, and released")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))

"""A report that cron starts on every host at the same minute, and that must be written by one of them at a time.

    0 3 * * *  DATABASE_URL=postgresql://me@db/app python cron_report.py

The others wait for their turn, find the report written and leave. `pglease run report -- ./report.sh` does the like
for a command that is not Python.
"""

import os
import sys
from pathlib import Path

from pglease import AcquireTimeout, PGLease

EX_TEMPFAIL = 75


def write_report(path: Path, token: int) -> None:
    """Write it under another name first: nobody must read half a report."""
    draft = path.with_suffix(".draft")
    draft.write_text(f"the report, written under fencing token {token}\n")
    draft.replace(path)


def main(path: Path, patience: float = 60) -> int:
    """Write the report unless it is there; give up after `patience` seconds of waiting for the host that is at it."""
    with PGLease(os.environ["DATABASE_URL"]) as leases:
        try:
            lease = leases.wait_for_lease("report", ttl=30, timeout=patience)
        except AcquireTimeout as busy:
            print(f"{busy.held_by} is still at it", file=sys.stderr)
            return EX_TEMPFAIL
        if path.exists():
            print("another host has written it")
        else:
            write_report(path, lease.fencing_token)
            print(f"written under fencing token {lease.fencing_token}")
        lease.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "report.txt"), *map(float, sys.argv[2:3])))

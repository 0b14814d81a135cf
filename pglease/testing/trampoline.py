"""Run as a script between us and a server: give up root, ask to die with the parent, become the server.

A `preexec_fn` could do the same, but not beside other threads, and Python warns of it. The interpreter may live where
the new user cannot go, so everything is imported before root is given up. Used as `python -I -S trampoline.py UID GID
SIGNAL PARENT PROGRAM ARGUMENT...`; a negative UID stays who we are.
"""

import ctypes
import os
import sys
import time

PR_SET_PDEATHSIG = 1
LOOK_EVERY = 0.5
"""Seconds between two looks at the parent where the kernel does not tell of its death."""


def become(uid: int, gid: int) -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def die_with(parent: int, signum: int) -> None:
    """Arrange that this process, whatever it becomes, gets the signal when its parent dies."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        # After setuid, which clears it. Tied to the parent's thread that made us, not to the parent.
        prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    elif os.fork() == 0:
        watch(parent, os.getppid(), signum)
        os._exit(0)
    if os.getppid() != parent:
        # It died before we asked: no signal would ever come.
        sys.exit(1)


def watch(parent: int, server: int, signum: int) -> None:
    """Signal the server when the parent is gone; end with the server."""
    while os.getppid() == server:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os.kill(server, signum)
            return
        except PermissionError:
            pass  # it lives, and belongs to root
        time.sleep(LOOK_EVERY)


def main(argv: list[str]) -> None:
    """Do all three."""
    uid, gid, signum, parent = map(int, argv[:4])
    if uid >= 0:
        become(uid, gid)
    die_with(parent, signum)
    os.execv(argv[4], argv[4:])


if __name__ == "__main__":
    main(sys.argv[1:])

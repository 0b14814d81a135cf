"""One process of a run: two threads that take leases, write to registers under them, and note what they see.

`python -m tests.jepsen.worker <facts as JSON>`. SIGUSR1 makes it hold the interpreter's lock for a while. On a line of
standard input it comes to rest, and on another one it ends.
"""

from __future__ import annotations

import contextvars
import ctypes
import json
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pglease import PGLease, clock
from pglease.errors import BackendError, NotOwnedError
from pglease.handles import HeldLease
from pglease.testing.checkers import Footprint
from pglease.testing.histories import Fault, Look, Op, Outcome, Over, Scribe, Told
from tests.jepsen.mistakes import MISTAKES
from tests.jepsen.registers import Pen

THREADS = 2
PULSE = 0.02
LATE = 0.05
"""Seconds by which a pulse may be late before the process counts as stalled."""
HOLD: contextvars.ContextVar[str] = contextvars.ContextVar("hold")


@dataclass(frozen=True)
class Orders:
    """What a worker is to do.

    Attributes:
        folder: where it writes.
        process: its name.
        url: the store.
        seed: of its choices.
        ttl: of its leases, in seconds.
        names: of its leases.
        port: of the registers.
        mistake: one that is put into the library, to see a checker notice it.
    """

    folder: str
    process: str
    url: str
    seed: str
    ttl: float
    names: list[str]
    port: int
    mistake: str = ""


class Worker:
    """See above."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.scribe = Scribe(Path(orders.folder) / f"{orders.process}.jsonl", orders.process)
        self.rests = threading.Event()
        self.leases: dict[str, HeldLease] = {}
        self.client = PGLease(orders.url, owner_id=orders.process, on_lease_lost=self.told, connect_timeout=3)

    def run(self) -> None:
        signal.signal(signal.SIGUSR1, self.stall)
        threading.Thread(target=self.pulse, daemon=True).start()
        threads = [threading.Thread(target=self.live, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        time.sleep(self.orders.ttl)
        self.footprint("before")
        sys.stdin.readline()
        self.rests.set()
        for thread in threads:
            thread.join()
        print("at rest", flush=True)
        sys.stdin.readline()
        self.footprint("after")
        self.client.close()

    def footprint(self, when: str) -> None:
        """Note what is in use."""
        facts = Footprint(threads=threading.active_count(), descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()))
        (Path(self.orders.folder) / f"{self.orders.process}.{when}").write_text(json.dumps(asdict(facts)))

    def stall(self, *_: object) -> None:
        """Let no other thread of this process run, as C code does that keeps the interpreter's lock."""
        ctypes.PyDLL(None).usleep(int(1e6 * self.orders.ttl * random.uniform(0.2, 1.5)))

    def pulse(self) -> None:
        """Note when this process could not run, for whatever reason."""
        last = clock.now()
        while True:
            time.sleep(PULSE)
            now = clock.now()
            if now - last > PULSE + LATE:
                self.scribe.note(Fault("stall", last, now, self.orders.process))
            last = now

    def told(self, name: str) -> None:
        """Note a loss: called by the library, in the context of whoever took the lease."""
        at, key = clock.now(), HOLD.get()
        lease = self.leases.get(key)
        loss = lease and lease.loss
        due = lease._hold.deadline if lease else 0.0  # lost before anybody had it in hand
        self.scribe.note(Told(key, at, due, loss.reason if loss else "unknown"))

    def live(self, number: int) -> None:
        """Take leases until it is time to rest."""
        rng = random.Random(f"{self.orders.seed}/{self.orders.process}/{number}")
        pen, count = Pen(self.orders.port), 0
        while not self.rests.is_set():
            count += 1
            key, name = f"{self.orders.process}.{number}.{count}", rng.choice(self.orders.names)
            if rng.random() < 0.15:
                self.look_up(key, name)
            else:
                self.take(key, name, rng, pen)

    def look_up(self, key: str, name: str) -> None:
        """Ask who has it."""
        op = self.scribe.begin(key, "get", name)
        try:
            lease = self.client.get_lease(name)
        except BackendError:
            self.end(op, "error")
            return
        if lease is None:
            self.end(op, "ok")
        else:
            self.end(op, "ok", token=lease.fencing_token, live=not lease.is_expired())

    def take(self, key: str, name: str, rng: random.Random, pen: Pen) -> None:
        """Ask for it, once or for a while, and work under it."""
        HOLD.set(key)
        wait = None if rng.random() < 0.3 else rng.uniform(0.1, 2 * self.orders.ttl)
        fair = wait is not None and rng.random() < 0.2
        op = self.scribe.begin(key, "acquire", name)
        try:
            with self.client.acquire(name, self.orders.ttl, wait=wait, fair=fair, on_lost="log") as lease:
                if lease:
                    self.leases[key] = lease
                    op = self.end(op, "ok", token=lease.fencing_token)
                    self.work(key, lease, rng, pen)
                    self.give_back(key, lease)
                else:
                    other = lease.lease
                    known = other is not None and not other.is_expired()
                    op = self.end(op, "denied", holder=other.fencing_token if known else None)
        except BackendError as error:
            if op.outcome == "unknown":
                self.end(op, "unknown" if getattr(error, "outcome_unknown", False) else "error")
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.05))

    def work(self, key: str, lease: HeldLease, rng: random.Random, pen: Pen) -> None:
        """Write while it is held: look, read, think, write."""
        for _ in range(rng.randint(3, 15) if rng.random() < 0.9 else rng.randint(50, 300)):
            at = clock.now()
            if not lease.held:
                return
            self.scribe.note(Look(key, at, at + lease.remaining()))
            base = pen.read(lease.name)
            time.sleep(rng.uniform(0, 0.02))
            pen.write(lease.name, key, lease.fencing_token, base)
            if rng.random() < 0.05:
                self.renew(f"{key}:renew{rng.random()}", lease)

    def renew(self, key: str, lease: HeldLease) -> None:
        """Extend it by hand."""
        op = self.scribe.begin(key, "renew", lease.name, lease.fencing_token)
        try:
            lease.renew()
        except NotOwnedError:
            self.end(op, _gone(lease))
        except BackendError:
            self.end(op, "unknown")
        else:
            self.end(op, "ok")

    def give_back(self, key: str, lease: HeldLease) -> None:
        """Release it, and note whether it had been lost."""
        op = self.scribe.begin(f"{key}:release", "release", lease.name, lease.fencing_token)
        try:
            self.end(op, "ok" if lease.release() else _gone(lease))
        except BackendError:
            self.end(op, "unknown")
        self.scribe.note(Over(key, clock.now(), lost=lease.loss is not None))

    def end(self, op: Op, outcome: Outcome, **facts: Any) -> Op:
        """Note what came of a call."""
        op = replace(op, ended=clock.now(), outcome=outcome, **facts)
        self.scribe.note(op)
        return op


def _gone(lease: HeldLease) -> Outcome:
    """Tell whether the store said that a hold is over, or this process did, which says nothing about the store."""
    return "gone" if lease.loss is not None and lease.loss.reason in {"taken", "deleted", "forced"} else "unknown"


if __name__ == "__main__":
    orders = Orders(**json.loads(sys.argv[1]))
    if orders.mistake:
        MISTAKES[orders.mistake].make()
    Worker(orders).run()

"""The statements, and the tables they are about. What is judged is judged in `sqlite`, under the file's write lock.

Times are nanoseconds of the host's boot clock: `expires_ns` is the one that decides. What they are on a wall clock is
kept for people: `wall_ns` is what has to be added, fixed once for each run of the host, so that stepping the wall clock
moves nothing; the view shows it. After a reboot the first writer moves all rows onto the new run's time line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pglease.schema import TableNames

PROTOCOL = 1
"""What clients of this version agree on about the meaning of a row. A file with another number is refused."""

COLUMNS = (
    "task_name",
    "owner_id",
    "lease_id",
    "fencing_token",
    "transitions",
    "metadata",
    "acquired_ns",
    "heartbeat_ns",
    "expires_ns",
    "waited_until_ns",
    "last_ticket",
)
QUEUE_COLUMNS = ("task_name", "number", "ticket_id", "owner_id", "expires_ns")
META_COLUMNS = ("protocol", "boot_id", "wall_ns", "token_floor")

# SQLite stores text in a column of numbers unless it is told not to. BINARY text compares as its bytes do, in the order
# of code points. Without a rowid the key is the table: one tree to write.
_CREATE_LEASES = """
CREATE TABLE {leases} (
  task_name     TEXT    NOT NULL PRIMARY KEY COLLATE BINARY,
  owner_id      TEXT    NOT NULL,
  lease_id      TEXT,
  fencing_token INTEGER NOT NULL CHECK (typeof(fencing_token) = 'integer' AND fencing_token > 0),
  transitions   INTEGER NOT NULL CHECK (typeof(transitions) = 'integer'),
  metadata      TEXT,
  acquired_ns   INTEGER NOT NULL CHECK (typeof(acquired_ns) = 'integer'),
  heartbeat_ns  INTEGER NOT NULL CHECK (typeof(heartbeat_ns) = 'integer'),
  expires_ns    INTEGER NOT NULL CHECK (typeof(expires_ns) = 'integer'),
  waited_until_ns INTEGER NOT NULL DEFAULT 0,  -- somebody waits for this name, or watches it, until then
  last_ticket     INTEGER NOT NULL DEFAULT 0   -- the greatest number that its queue has given
) WITHOUT ROWID
"""
_CREATE_QUEUE = """
CREATE TABLE {queue} (
  task_name  TEXT    NOT NULL COLLATE BINARY,
  number     INTEGER NOT NULL,
  ticket_id  TEXT    NOT NULL,
  owner_id   TEXT    NOT NULL,
  expires_ns INTEGER NOT NULL CHECK (typeof(expires_ns) = 'integer'),
  PRIMARY KEY (task_name, number)
) WITHOUT ROWID
"""
_CREATE_META = """
CREATE TABLE {meta} (
  id          INTEGER PRIMARY KEY CHECK (id = 1),
  protocol    INTEGER NOT NULL,
  boot_id     TEXT    NOT NULL,
  wall_ns     INTEGER NOT NULL,
  token_floor INTEGER NOT NULL DEFAULT 0
)
"""
_CREATE_VIEW = """
CREATE VIEW IF NOT EXISTS {view} AS
SELECT task_name, owner_id, fencing_token, transitions, metadata, lease_id IS NULL AS given_back,
       datetime((m.wall_ns + l.acquired_ns) / 1000000000, 'unixepoch') AS acquired_at,
       datetime((m.wall_ns + l.heartbeat_ns) / 1000000000, 'unixepoch') AS heartbeat_at,
       datetime((m.wall_ns + l.expires_ns) / 1000000000, 'unixepoch') AS expires_at
FROM {leases} l JOIN {meta} m
"""
_MARK = "INSERT INTO {meta} (id, protocol, boot_id, wall_ns) VALUES (1, {protocol}, ?, ?)"

_SEEN = f"""
SELECT {", ".join(f"m.{name}" for name in META_COLUMNS)}, {", ".join(f"l.{name}" for name in COLUMNS)}
"""

# get, and the first half of every other verb. One row, whose second half is NULL when the name is unknown.
_LOOK = _SEEN + "FROM {meta} m LEFT JOIN {leases} l ON l.task_name = ?"

# list: C10. `substr` and not LIKE or GLOB: a name may contain % and *.
_LIST = (
    _SEEN
    + """FROM {meta} m LEFT JOIN {leases} l ON l.task_name >= :prefix AND substr(l.task_name, 1, :length) = :prefix
ORDER BY l.task_name"""
)

# try_acquire, once the name was found free under the write lock: C1 C3. adopt, once the hold was found to run: C20.
_PUT = f"""
INSERT INTO {{leases}} ({", ".join(COLUMNS)}) VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT (task_name) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])}
"""  # noqa: S608  # names of columns, from above

# renew: C4 C5. set_metadata: C21. release, force_release: C6. Each for a row that was judged under the same write lock.
_RENEW = "UPDATE {leases} SET heartbeat_ns = ?, expires_ns = ? WHERE task_name = ?"
_DESCRIBE = "UPDATE {leases} SET metadata = ? WHERE task_name = ?"
_END = "UPDATE {leases} SET lease_id = NULL, expires_ns = ? WHERE task_name = ?"

# cleanup: C3 C7. A row that is deleted takes its token along, so new names start above it.
_RAISE_FLOOR = """
UPDATE {meta} SET token_floor = max(token_floor, coalesce(
  (SELECT max(fencing_token) FROM {leases} WHERE {doomed}), 0))
"""
_CLEANUP = "DELETE FROM {leases} WHERE {doomed}"
_DOOMED = """expires_ns <= :before
  AND NOT EXISTS (SELECT 1 FROM {queue} q WHERE q.task_name = {leases}.task_name AND q.expires_ns > :now)"""
_CLEANUP_QUEUE = "DELETE FROM {queue} WHERE expires_ns <= :now"

# mark: C16. A longer mark is never shortened.
_WAIT = "UPDATE {leases} SET waited_until_ns = max(waited_until_ns, ?) WHERE task_name = ?"

# queue, leave_queue, and what reserves a free name: C17.
_HEAD = """
SELECT ticket_id, owner_id, expires_ns FROM {queue} WHERE task_name = ? AND expires_ns > ? ORDER BY number LIMIT 1
"""
_QUEUED = "SELECT owner_id FROM {queue} WHERE task_name = ? AND expires_ns > ? ORDER BY number"
_QUEUES = """
SELECT task_name, owner_id FROM {queue}
WHERE task_name >= :prefix AND substr(task_name, 1, :length) = :prefix AND expires_ns > :now ORDER BY task_name, number
"""
_DROP_DEAD = "DELETE FROM {queue} WHERE task_name = ? AND expires_ns <= ?"
_TICKET = "SELECT number FROM {queue} WHERE task_name = ? AND ticket_id = ?"
_RENEW_TICKET = "UPDATE {queue} SET expires_ns = ? WHERE task_name = ? AND number = ?"
_NUMBER = "UPDATE {leases} SET last_ticket = ? WHERE task_name = ?"
_ARRIVE = "INSERT INTO {queue} (task_name, number, ticket_id, owner_id, expires_ns) VALUES (?, ?, ?, ?, ?)"
_AHEAD = "SELECT count(*) FROM {queue} WHERE task_name = ? AND number < ?"
_LEAVE = "DELETE FROM {queue} WHERE task_name = ? AND ticket_id = ?"

# The first writer after a reboot: every hold is over, and people still see when it was.
_MOVE = """
UPDATE {leases} SET acquired_ns = min(acquired_ns + :shift, :now), heartbeat_ns = min(heartbeat_ns + :shift, :now),
                    expires_ns = min(expires_ns + :shift, :now), waited_until_ns = 0
"""
_EMPTY_QUEUES = "DELETE FROM {queue}"
_MOVED = "UPDATE {meta} SET boot_id = :boot_id, wall_ns = :wall"


@dataclass(frozen=True, slots=True)
class Statements:
    """Every statement, rendered for one pair of tables."""

    create_leases: str
    create_meta: str
    create_queue: str
    create_view: str
    mark: str
    look: str
    list: str
    put: str
    renew: str
    describe: str
    end: str
    raise_floor: str
    cleanup: str
    cleanup_queue: str
    wait: str
    head: str
    queued: str
    queues: str
    drop_dead: str
    ticket: str
    renew_ticket: str
    number: str
    arrive: str
    ahead: str
    leave: str
    move: str
    moved: str
    empty_queues: str

    @classmethod
    def of(cls, names: TableNames) -> Statements:
        """Render for the tables in `names`."""
        known = {
            "leases": names.leases,
            "meta": names.meta,
            "queue": f'"{names.table}_queue"',
            "view": f'"{names.table}_for_people"',
            "protocol": PROTOCOL,
        }
        known["doomed"] = _DOOMED.format(**known)
        return cls(**{field.name: globals()[f"_{field.name.upper()}"].format(**known) for field in fields(cls)})

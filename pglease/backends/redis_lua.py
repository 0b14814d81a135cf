"""The scripts that decide: one for each verb, each atomic, judged by the server's own `TIME`.

A name's keys have one hash tag, so that all live on one node of a Cluster:

    pglease:1:{name}:lease     a hash, the record of the present or the last hold; no TTL, since it outlives its hold
    pglease:1:{name}:token     a counter, the name's last fencing token; nothing of ours ever deletes it
    pglease:1:{name}:queue     who waits in order: ticket ids by number
    pglease:1:{name}:tickets   the same ids by the moment until which each counts
    pglease:1:{name}:labels    and their owners' labels; the last three exist only while somebody queues

Most scripts take the first key alone, a plain try the first two: while a Cluster moves a slot, it serves no request
that misses one of its keys.

Releases and grants of a name that somebody waits for are published on the channel `pglease:1:changes`.

The `1` is the layout's version: another layout would be other keys. Moments are microseconds since 1970, which a double
of Lua holds exactly; fencing tokens may be larger than that and stay text. A value under one of these keys that is not
ours is refused, never overwritten: the script answers 'foreign'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1

_FIELDS = (
    "name",
    "lease_id",
    "owner_id",
    "fencing_token",
    "transitions",
    "acquired_at",
    "heartbeat_at",
    "expires_at",
    "metadata",
    "ended",
    "marked_until",
    "queued_until",
)
"""The record, in the order in which Lua numbers it: what `tell` says stands together, and in it the numbers.
`lease_id` is empty once the hold was ended; `ended` says by whose request that was, so that a request whose reply was
lost can be told from a late one. `queued_until` is the end of the last ticket."""
KEYS = ("lease", "token", "queue", "tickets", "labels")

_PRELUDE = f"""
-- The server's clock, in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- What a script answers: lines, the verdict first. One text is read in a tenth of the time of an array.
local function lines(...)
  return table.concat({{...}}, '\\n')
end

local function text(number)
  return string.format('%.0f', number)
end

-- Run a command on a key that somebody else may have written; nil when it holds something of another type. Any other
-- error (no memory, no right, no primary) ends the script.
local function ask(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if string.find(answer.err, 'WRONGTYPE', 1, true) then return nil end
  return redis.call(...)
end

-- The record, or nil when there is none. The second result says that the key holds something else.
local function read()
  local record = ask('HMGET', KEYS[1], '{"', '".join(_FIELDS)}')
  if not record then return nil, true end
  if not record[1] then return nil, redis.call('EXISTS', KEYS[1]) == 1 end
  for place = 2, 9 do
    if not record[place] then return nil, true end
  end
  local numbers = string.find(table.concat(record, ' ', 4, 8), '^%d+ %d+ %d+ %d+ %d+$')
  if record[1] ~= ARGV[1] or not numbers then return nil, true end
  if string.find(record[3], '\\n', 1, true) or string.find(record[9], '\\n', 1, true) then return nil, true end
  return record
end

local function runs(record)
  return now < tonumber(record[8])
end

local function is_held_by(record, lease_id)
  return record[2] == lease_id and runs(record)
end

local function tell(verdict, record)
  return lines(verdict, table.concat(record, '\\n', 3, 9), text(now), record[2] == '' and 'ended' or '')
end

-- Why a hold under this id is over.
local function reason(record, lease_id)
  if record[2] == lease_id then return 'expired' end
  return record[2] == '' and 'forced' or 'taken'
end

-- Tell whoever listens, if somebody waits for the name. A user without the right to publish wakes nobody.
local function announce(channel, record, what, ends)
  if tonumber(record[11] or 0) > now then
    redis.pcall('PUBLISH', channel, what .. ' ' .. text(math.max(0, ends - now)) .. ' ' .. ARGV[1])
  end
end

local record, foreign = read()
if foreign then return 'foreign' end
"""
_MORE_KEYS = """
local function is_above(token, other)
  if #token ~= #other then return #token > #other end
  return token > other
end

-- The name's next token, or nil when its counter holds something else.
local function next_token()
  local last = ask('GET', KEYS[2])
  if last == nil then return nil end
  last = last or '0'
  if not string.find(last, '^%d+$') or is_above(last, '9223372036854775806') then return nil end
  if record and is_above(record[4], last) then redis.call('SET', KEYS[2], record[4]) end
  redis.call('INCR', KEYS[2])
  return redis.call('GET', KEYS[2])
end

local function drop(ticket_id)
  redis.call('ZREM', KEYS[4], ticket_id)
  redis.call('HDEL', KEYS[5], ticket_id)
  if redis.call('ZREM', KEYS[3], ticket_id) == 0 then return false end
  if redis.call('EXISTS', KEYS[3]) == 0 then redis.call('HDEL', KEYS[1], 'queued_until') end
  return true
end

local function drop_dead()
  for _, ticket_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', text(now))) do drop(ticket_id) end
end

-- The ticket at the head of the queue, or nil.
local function head()
  drop_dead()
  return redis.call('ZRANGE', KEYS[3], 0, 0)[1]
end
"""


@dataclass(frozen=True)
class Script:
    """One script, and the digest that the server knows it by.

    Attributes:
        body: what it does.
        keys: how many of a name's keys it takes.
        text: all of it.
        sha: its digest.
        head: how every request for it begins, as the server reads it: EVALSHA, the digest, the number of keys.
    """

    body: str
    keys: int = 1
    text: str = field(init=False)
    sha: str = field(init=False)
    head: str = field(init=False)

    def __post_init__(self) -> None:
        text = _PRELUDE + (_MORE_KEYS if self.keys > 1 else "") + self.body
        object.__setattr__(self, "text", text)
        sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", sha)
        object.__setattr__(self, "head", f"$7\r\nEVALSHA\r\n$40\r\n{sha}\r\n$1\r\n{self.keys}\r\n")


# ARGV: name, lease_id, owner_id, ttl, metadata, ticket_id, channel. Where somebody queues for a free name, a plain try
# answers 'queued' and is to be made again with all keys.
#
# A hold under the same id is our own earlier grant, whose reply was lost. It is written once more, so that a WAIT on
# this connection waits for it.
#
# A token beside which a record with a larger one stands was lost or overwritten by somebody: it goes on above that one.
# The counter first: should the server refuse the rest, a number was skipped and nothing was granted.
_ACQUIRE = """
if record and runs(record) then
  if record[2] ~= ARGV[2] then return tell('held', record) end
  redis.call('HSET', KEYS[1], 'lease_id', ARGV[2])
  return tell('granted', record)
end
local first
if record and tonumber(record[12] or 0) > now then
  if #KEYS == 2 then return 'queued' end
  first = head()
  if first and first ~= ARGV[6] then
    return lines('reserved', redis.call('HGET', KEYS[5], first) or '', text(redis.call('ZSCORE', KEYS[4], first) - now))
  end
end

local token = next_token()
if not token then return 'foreign token' end
local begins, ends = text(now), text(now + ARGV[4])
local transitions = record and text(record[5] + 1) or '0'
redis.call('HSET', KEYS[1], 'name', ARGV[1], 'lease_id', ARGV[2], 'owner_id', ARGV[3], 'fencing_token', token,
  'transitions', transitions, 'acquired_at', begins, 'heartbeat_at', begins, 'expires_at', ends, 'metadata', ARGV[5])
if first then drop(first) end
if record then announce(ARGV[7], record, 'granted', now + ARGV[4]) end
return lines('granted', ARGV[3], token, transitions, begins, begins, ends, ARGV[5], begins, '')
"""
TRY_ACQUIRE = Script(_ACQUIRE, keys=2)
TRY_ACQUIRE_IN_QUEUE = Script(_ACQUIRE, keys=len(KEYS))

# ARGV: name, lease_id, ttl.
RENEW = Script("""
if not record then return 'deleted' end
if not is_held_by(record, ARGV[2]) then return tell(reason(record, ARGV[2]), record) end
record[7], record[8] = text(now), text(now + ARGV[3])
redis.call('HSET', KEYS[1], 'heartbeat_at', record[7], 'expires_at', record[8])
return tell('held', record)
""")

# ARGV: name, lease_id, next_id, owner_id, ttl, channel. As above: what was done before is written once more.
ADOPT = Script(
    """
if not record then return 'deleted' end
if is_held_by(record, ARGV[3]) then
  redis.call('HSET', KEYS[1], 'lease_id', ARGV[3])
  return tell('granted', record)
end
if not is_held_by(record, ARGV[2]) then return tell(reason(record, ARGV[2]), record) end
local token = next_token()
if not token then return 'foreign token' end
local begins, ends, transitions = text(now), text(now + ARGV[5]), text(record[5] + 1)
redis.call('HSET', KEYS[1], 'owner_id', ARGV[4], 'lease_id', ARGV[3], 'fencing_token', token,
  'transitions', transitions, 'acquired_at', begins, 'heartbeat_at', begins, 'expires_at', ends)
announce(ARGV[6], record, 'granted', now + ARGV[5])
return lines('granted', ARGV[4], token, transitions, begins, begins, ends, record[9], begins, '')
""",
    keys=2,
)

# ARGV: name, lease_id, metadata.
DESCRIBE = Script("""
if not record then return 'deleted' end
if not is_held_by(record, ARGV[2]) then return tell(reason(record, ARGV[2]), record) end
record[9] = ARGV[3]
redis.call('HSET', KEYS[1], 'metadata', ARGV[3])
return tell('held', record)
""")

# ARGV: name, lease_id, min_hold, channel, and 'again' when an earlier try of the same request got no reply.
RELEASE = Script("""
if not record then return 'deleted' end
if is_held_by(record, ARGV[2]) then
  local ends = math.max(now, record[6] + ARGV[3])
  redis.call('HSET', KEYS[1], 'lease_id', '', 'expires_at', text(ends), 'ended', ARGV[2])
  announce(ARGV[4], record, 'released', ends)
  return 'released'
end
if ARGV[5] == 'again' and record[10] == ARGV[2] then return 'released' end
local why = reason(record, ARGV[2])
if why == 'expired' then redis.call('HSET', KEYS[1], 'lease_id', '') end
return tell(why, record)
""")

# ARGV: name, fencing_token, channel, and 'again' as above.
FORCE_RELEASE = Script("""
if not record then return 'over' end
if record[4] == ARGV[2] and runs(record) then
  redis.call('HSET', KEYS[1], 'lease_id', '', 'expires_at', text(now), 'ended', ARGV[2])
  announce(ARGV[3], record, 'released', now)
  return 'forced'
end
return ARGV[4] == 'again' and record[10] == ARGV[2] and 'forced' or 'over'
""")

# ARGV: name.
LOOK = Script("""
if not record then return 'deleted' end
return tell(record[2] == '' and 'ended' or 'held', record)
""")

# ARGV: name, older_than. The counter stays: tokens never go back.
CLEAN_UP = Script("""
if not record or tonumber(record[8]) > now - ARGV[2] then return 'kept' end
if tonumber(record[12] or 0) > now then return 'kept' end
redis.call('DEL', KEYS[1])
return 'deleted'
""")

# ARGV: name, seconds. The mark is written only if the present one ends within half of that: waiters do not add writes.
MARK = Script("""
if not record then return 'deleted' end
if tonumber(record[11] or 0) < now + ARGV[2] / 2 then
  redis.call('HSET', KEYS[1], 'marked_until', text(now + ARGV[2]))
end
return 'marked'
""")

# ARGV: name, ticket_id, owner_id, ttl. Should all who wait die, their keys go by themselves a minute later.
_QUEUE_UP = """
if not record then return 'deleted' end
drop_dead()
if not redis.call('ZSCORE', KEYS[3], ARGV[2]) then
  redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[1], 'last_number', 1), ARGV[2])
  redis.call('HSET', KEYS[5], ARGV[2], ARGV[3])
end
redis.call('ZADD', KEYS[4], text(now + ARGV[4]), ARGV[2])
local ends = math.max(now + ARGV[4], tonumber(record[12] or 0))
redis.call('HSET', KEYS[1], 'queued_until', text(ends))
for place = 3, 5 do redis.call('PEXPIREAT', KEYS[place], text(ends / 1000 + 60000)) end
return lines('queued', text(redis.call('ZSCORE', KEYS[3], ARGV[2])), redis.call('ZRANK', KEYS[3], ARGV[2]))
"""
QUEUE = Script(_QUEUE_UP, keys=len(KEYS))

# ARGV: name. Looking drops nobody: dead tickets are passed over.
_QUEUED = """
local labels = {'queued'}
for _, ticket_id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if tonumber(redis.call('ZSCORE', KEYS[4], ticket_id) or 0) > now then
    labels[#labels + 1] = redis.call('HGET', KEYS[5], ticket_id)
  end
end
return lines(unpack(labels))
"""
QUEUED = Script(_QUEUED, keys=len(KEYS))

# ARGV: name, ticket_id, channel. Whoever waits may be the next.
_LEAVE = """
if not record or not drop(ARGV[2]) then return 'absent' end
announce(ARGV[3], record, 'released', tonumber(record[8]))
return 'left'
"""
LEAVE_QUEUE = Script(_LEAVE, keys=len(KEYS))

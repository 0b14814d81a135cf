"""The scripts that decide: one for each verb, each atomic, judged by the server's own `TIME`.

A name has two keys in one hash tag, so that both live on one node of a Cluster:

    pglease:1:{name}:lease   a hash, the record of the present or the last hold; no TTL, since it outlives its hold
    pglease:1:{name}:token   a counter, the name's last fencing token; nothing of ours ever deletes it

The `1` is the layout's version: another layout would be other keys. Moments are microseconds since 1970, which a double
of Lua holds exactly; fencing tokens may be larger than that and stay text. A value under one of these keys that is not
ours is refused, never overwritten: the script answers 'foreign'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1

_FIELDS = (
    "name",
    "owner_id",
    "lease_id",
    "fencing_token",
    "transitions",
    "metadata",
    "acquired_at",
    "heartbeat_at",
    "expires_at",
    "ended",
)
"""The record, in the order in which `held` in Lua numbers it. `lease_id` is empty once the hold was ended; `ended` says
by whose request that was, so that a request whose reply was lost can be told from a late one."""

_PRELUDE = f"""
-- The server's clock, in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(number)
  return string.format('%.0f', number)
end

-- The record, or nil when there is none. The second result says that the key holds something else.
local function read()
  local record = redis.pcall('HMGET', KEYS[1], '{"', '".join(_FIELDS)}')
  if record.err then return nil, true end
  if not record[1] then return nil, redis.call('EXISTS', KEYS[1]) == 1 end
  local sound = record[1] == ARGV[1] and record[2] and record[3] and record[6]
  for _, place in ipairs({{4, 5, 7, 8, 9}}) do sound = sound and string.find(record[place] or '', '^%d+$') end
  if not sound then return nil, true end
  return record
end

local function runs(record)
  return now < tonumber(record[9])
end

local function is_held_by(record, lease_id)
  return record[3] == lease_id and runs(record)
end

local function tell(verdict, record)
  return {{verdict, record[2], record[4], record[5], record[6], record[7], record[8], record[9], text(now)}}
end

-- Why a hold under this id is over.
local function reason(record, lease_id)
  if record[3] == lease_id then return 'expired' end
  return record[3] == '' and 'forced' or 'taken'
end

local record, foreign = read()
if foreign then return {{'foreign'}} end
"""


@dataclass(frozen=True)
class Script:
    """One script, and the digest that the server knows it by."""

    body: str
    text: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        text = _PRELUDE + self.body
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "sha", sha1(text.encode(), usedforsecurity=False).hexdigest())


# ARGV: name, lease_id, owner_id, ttl, metadata. A hold under the same id is our own earlier grant, whose reply was
# lost. It is written once more, so that a WAIT on this connection waits for it.
#
# A token beside which a record with a larger one stands was lost or overwritten by somebody: it goes on above that one.
# The counter first: should the server refuse the rest, a number was skipped and nothing was granted.
TRY_ACQUIRE = Script("""
if record and runs(record) then
  if record[3] ~= ARGV[2] then return tell('held', record) end
  redis.call('HSET', KEYS[1], 'lease_id', ARGV[2])
  return tell('granted', record)
end

local function next_token()
  local raised = redis.pcall('INCR', KEYS[2])
  if type(raised) == 'table' then return nil end
  return redis.call('GET', KEYS[2])
end

local function is_above(token, other)
  if #token ~= #other then return #token > #other end
  return token > other
end

local token = next_token()
if token and record and not is_above(token, record[4]) then
  redis.call('SET', KEYS[2], record[4])
  token = next_token()
end
if not token or string.sub(token, 1, 1) == '-' then return {'foreign token'} end

local begins, ends = text(now), text(now + ARGV[4])
local transitions = record and text(record[5] + 1) or '0'
redis.call('HSET', KEYS[1], 'name', ARGV[1], 'owner_id', ARGV[3], 'lease_id', ARGV[2], 'fencing_token', token,
  'transitions', transitions, 'metadata', ARGV[5], 'acquired_at', begins, 'heartbeat_at', begins, 'expires_at', ends)
return {'granted', ARGV[3], token, transitions, ARGV[5], begins, begins, ends, text(now)}
""")

# ARGV: name, lease_id, ttl.
RENEW = Script("""
if not record then return {'deleted'} end
if not is_held_by(record, ARGV[2]) then return tell(reason(record, ARGV[2]), record) end
record[8], record[9] = text(now), text(now + ARGV[3])
redis.call('HSET', KEYS[1], 'heartbeat_at', record[8], 'expires_at', record[9])
return tell('held', record)
""")

# ARGV: name, lease_id, min_hold, and 'again' when an earlier try of the same request got no reply.
RELEASE = Script("""
if not record then return {'deleted'} end
if is_held_by(record, ARGV[2]) then
  local ends = math.max(now, record[7] + ARGV[3])
  redis.call('HSET', KEYS[1], 'lease_id', '', 'expires_at', text(ends), 'ended', ARGV[2])
  return {'released'}
end
if ARGV[4] == 'again' and record[10] == ARGV[2] then return {'released'} end
local why = reason(record, ARGV[2])
if why == 'expired' then redis.call('HSET', KEYS[1], 'lease_id', '') end
return tell(why, record)
""")

# ARGV: name, fencing_token, and 'again' as above.
FORCE_RELEASE = Script("""
if not record then return {'over'} end
if record[4] == ARGV[2] and runs(record) then
  redis.call('HSET', KEYS[1], 'lease_id', '', 'expires_at', text(now), 'ended', ARGV[2])
  return {'forced'}
end
return {ARGV[3] == 'again' and record[10] == ARGV[2] and 'forced' or 'over'}
""")

# ARGV: name.
LOOK = Script("""
if not record then return {'deleted'} end
return tell(record[3] == '' and 'ended' or 'held', record)
""")

# ARGV: name, older_than. The counter stays: tokens never go back.
CLEAN_UP = Script("""
if not record or tonumber(record[9]) > now - ARGV[2] then return {'kept'} end
redis.call('DEL', KEYS[1])
return {'deleted'}
""")

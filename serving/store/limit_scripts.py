"""The Lua that counts limits inside the store, each call one step on the store's own clock.

A scope (a tenant, or one of its keys) is one string of 13 little-endian doubles:

    b r t cr ct    slot of the minute's window; requests and tokens in the window; those of the slot b alone
    D d            day; tokens admitted in it
    s              streams that run
    ub u cu        slot of the hour's window; nano-usd in the window; those of the slot ub alone
    ou p           the cost breaker: open until (0: closed), and whether its probe runs

Older slots of a window lie in hashes beside it (`:r`, `:t`, `:u`: slot → amount). A window keeps `keep` slots before
the one that runs, so an amount counts for one window and up to one slot more: never shorter, so never too much passes.
What is settled is put right in the slot in which it was reserved. Numbers are whole, so nothing drifts.

A reservation is a field of its worker's hash: number → the 7 doubles below and its scopes' keys. Whoever takes that
field away puts the amounts right: the worker that settles, or another one's heartbeat when the worker is dead. It is
there once, so it is done once. An empty field says that this number is over, whatever comes late.

Replies are doubles too: cheap to make here, one unpack there.
"""

from __future__ import annotations

from serving.store.pipelined import Script

# A call makes the functions of its script anew, so each script has those alone that it needs.
_FORMATS = """
local F, SETTINGS, RECORD = '<ddddddddddddd', '<dddddd', '<ddddddd'
local floor = math.floor

local function has(mask, bit) return mask % (bit * 2) >= bit end
"""

_WINDOWS = """
-- Moves a window on from slot `from` to `to`; returns what is left in it.
local function turned(hash, from, to, keep, total, current)
  if to - from > keep or total == current then
    if total ~= 0 then redis.call('DEL', hash) end
    if to - from > keep then return 0 end
  end
  if total ~= current then
    local old = {}
    for slot = from - keep, to - keep - 1 do old[#old + 1] = slot end
    local amounts = redis.call('HMGET', hash, unpack(old))
    for i = 1, #amounts do if amounts[i] then total = total - amounts[i] end end
    redis.call('HDEL', hash, unpack(old))
  end
  if current ~= 0 then
    redis.call('HSET', hash, from, current)
    redis.call('EXPIRE', hash, 90000)
  end
  return total
end

-- Seconds until `over` less is in the window. A millisecond more, so that no rounding ends it too early.
local function wait_s(hash, slot, keep, slot_s, over, now)
  local amounts, flat = {}, redis.call('HGETALL', hash)
  for i = 1, #flat, 2 do amounts[tonumber(flat[i])] = tonumber(flat[i + 1]) end
  for old = slot - keep, slot - 1 do
    over = over - (amounts[old] or 0)
    if over <= 0 then return (old + keep + 1) * slot_s - now + 0.001 end
  end
  return (slot + keep + 1) * slot_s - now + 0.001
end

local function clock()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end
"""

_ADJUST = """
-- Adds to what a reservation counted, where it counted it. `probe`: 0 none of it, 1 its answer came, 2 its worker died.
local function adjust(key, keep, hour_keep, slot, hour_slot, day, requests, tokens, streams, usd, probe)
  local raw = redis.call('GET', key)
  if not raw then return end
  local b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p = struct.unpack(F, raw)
  if slot == b then
    r, cr, t, ct = r + requests, cr + requests, t + tokens, ct + tokens
  elseif slot < b and slot >= b - keep then
    if requests ~= 0 then r = r + requests; redis.call('HINCRBY', key .. ':r', slot, requests) end
    if tokens ~= 0 then t = t + tokens; redis.call('HINCRBY', key .. ':t', slot, tokens) end
  end
  if day == D then d = d + tokens end
  if usd ~= 0 then
    if hour_slot == ub then u, cu = u + usd, cu + usd
    elseif hour_slot < ub and hour_slot >= ub - hour_keep then
      u = u + usd
      redis.call('HINCRBY', key .. ':u', hour_slot, usd)
    end
  end
  if probe ~= 0 then p = 0 end
  if probe == 1 then ou = 0 end
  redis.call('SET', key, struct.pack(F, b, r, t, cr, ct, D, d, s + streams, ub, u, cu, ou, p), 'KEEPTTL')
end

"""

_GIVE_BACK = """
-- Gives back what a reservation holds that nobody settles: all of it, the requests only where `requests` is 1.
local function give_back(record, keep, hour_keep, requests)
  if record == '' then return end
  local slot, hour_slot, day, tokens, usd, stream, masks, at = struct.unpack(RECORD, record)
  local bit = 1
  for key in string.gmatch(string.sub(record, at), '[^%z]+') do
    local money = has(masks, bit) and usd or 0
    local probe = has(masks, bit * 4) and 2 or 0
    adjust(key, keep, hour_keep, slot, hour_slot, day, -requests, -tokens, -stream, -money, probe)
    bit = bit * 2
  end
end
"""

# KEYS: the worker's reservations, then the scopes. ARGV: the settings; a scope's bounds each (-1: none); the request.
RESERVE = Script(
    _FORMATS
    + _WINDOWS
    + """
local slot_s, keep, hour_slot_s, hour_keep, day_s, open_s = struct.unpack(SETTINGS, ARGV[1])
local tokens, usd, stream, number = struct.unpack('<dddd', ARGV[#ARGV])
local now = clock()
local slot, hour_slot, day = floor(now / slot_s), floor(now / hour_slot_s), floor(now / day_s)
local kind, where, retry_s, tripped, masks, bit = 0, 0, 0, 0, 0, 1
local scopes, changed = {}, {}

local function refuse(why, scope, after_s)
  if kind == 0 or after_s > retry_s then kind, where, retry_s = why, scope, after_s end
end

for i = 2, #KEYS do
  local key = KEYS[i]
  local max_r, max_t, max_d, max_s, max_u = struct.unpack('<ddddd', ARGV[i])
  local b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p = 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  local raw = redis.call('GET', key)
  if raw then b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p = struct.unpack(F, raw) end
  if slot > b then
    r = turned(key .. ':r', b, slot, keep, r, cr)
    t = turned(key .. ':t', b, slot, keep, t, ct)
    b, cr, ct, changed[i] = slot, 0, 0, true
  end
  if day > D then D, d = day, 0 end
  if stream == 1 and max_s >= 0 and s + 1 > max_s then refuse(4, i, 0) end
  if max_r >= 0 and r + 1 > max_r then refuse(1, i, wait_s(key .. ':r', b, keep, slot_s, r + 1 - max_r, now)) end
  if max_t >= 0 and t + tokens > max_t then
    refuse(2, i, wait_s(key .. ':t', b, keep, slot_s, t + tokens - max_t, now))
  end
  if max_d >= 0 and d + tokens > max_d then refuse(3, i, (D + 1) * day_s - now + 0.001) end
  if max_u >= 0 then
    masks = masks + bit
    if hour_slot > ub then
      u = turned(key .. ':u', ub, hour_slot, hour_keep, u, cu)
      ub, cu, changed[i] = hour_slot, 0, true
    end
    if now < ou then refuse(5, i, ou - now)
    elseif p ~= 0 then refuse(5, i, 0)
    elseif u + usd > max_u then
      local after_s = math.max(wait_s(key .. ':u', ub, hour_keep, hour_slot_s, u + usd - max_u, now), open_s)
      if ou == 0 then tripped = i - 1 end
      ou, changed[i] = now + after_s, true
      refuse(5, i, after_s)
    elseif ou ~= 0 then
      p = 1
      masks = masks + bit * 4
    end
  end
  scopes[i] = {b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p}
  bit = bit * 2
end

if kind == 0 then
  local record = struct.pack(RECORD, slot, hour_slot, day, tokens, usd, stream, masks) .. KEYS[2]
  if KEYS[3] then record = record .. '\\0' .. KEYS[3] end
  if redis.call('HSETNX', KEYS[1], number, record) == 0 then kind = -1 end
end
local seen = ''
bit = 1
for i = 2, #KEYS do
  local x = scopes[i]
  if kind == 0 then
    x[2], x[3], x[4], x[5], x[7], x[8] = x[2] + 1, x[3] + tokens, x[4] + 1, x[5] + tokens, x[7] + tokens, x[8] + stream
    if has(masks, bit) then x[10], x[11] = x[10] + usd, x[11] + usd end
  elseif has(masks, bit * 4) then
    x[13] = 0
  end
  if kind == 0 or changed[i] then redis.call('SET', KEYS[i], struct.pack(F, unpack(x)), 'EX', 90000) end
  seen = seen .. struct.pack('<dddd', x[2], x[3], x[7], x[10])
  bit = bit * 2
end
return struct.pack('<ddddddddd', kind, where - 1, retry_s, now, slot, hour_slot, day, masks, tripped) .. seen
"""
)

# KEYS as RESERVE's. ARGV: the settings, and what is added to what was reserved. Replies 0 when it was settled before.
SETTLE = Script(
    _FORMATS
    + _ADJUST
    + """
local _, keep, _, hour_keep = struct.unpack(SETTINGS, ARGV[1])
local number, slot, hour_slot, day, tokens, usd, streams, masks = struct.unpack('<dddddddd', ARGV[2])
if redis.call('HDEL', KEYS[1], number) == 0 then return 0 end
local bit = 1
for i = 2, #KEYS do
  local money, probe = has(masks, bit) and usd or 0, has(masks, bit * 4) and 1 or 0
  if tokens ~= 0 or money ~= 0 or streams ~= 0 or probe ~= 0 then
    adjust(KEYS[i], keep, hour_keep, slot, hour_slot, day, 0, tokens, streams, money, probe)
  end
  bit = bit * 2
end
return 1
"""
)

# Undoes a reservation of which nobody knows whether it was made; it then never will be. KEYS: the worker's.
RELEASE = Script(
    _FORMATS
    + _ADJUST
    + _GIVE_BACK
    + """
local _, keep, _, hour_keep = struct.unpack(SETTINGS, ARGV[1])
local record = redis.call('HGET', KEYS[1], ARGV[2])
if record == '' then return 0 end
redis.call('HSET', KEYS[1], ARGV[2], '')
if not record then return 0 end
give_back(record, keep, hour_keep, 1)
return 1
"""
)

# What was counted elsewhere while the store was away. KEYS as RESERVE's; ARGV: the settings, a number as of a
# reservation, and for each scope day, requests, tokens, nano-usd. Replies 0 when this number was added before.
ADD = Script(
    _FORMATS
    + _WINDOWS
    + """
local slot_s, keep, hour_slot_s, hour_keep, day_s = struct.unpack(SETTINGS, ARGV[1])
if redis.call('HSETNX', KEYS[1], ARGV[2], '') == 0 then return 0 end
local now = clock()
local slot, hour_slot, today = floor(now / slot_s), floor(now / hour_slot_s), floor(now / day_s)
for i = 2, #KEYS do
  local key = KEYS[i]
  local day, requests, tokens, usd = struct.unpack('<dddd', ARGV[i + 1])
  local b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p = 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  local raw = redis.call('GET', key)
  if raw then b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p = struct.unpack(F, raw) end
  if slot > b then
    r = turned(key .. ':r', b, slot, keep, r, cr)
    t = turned(key .. ':t', b, slot, keep, t, ct)
    b, cr, ct = slot, 0, 0
  end
  if hour_slot > ub then u, ub, cu = turned(key .. ':u', ub, hour_slot, hour_keep, u, cu), hour_slot, 0 end
  if today > D then D, d = today, 0 end
  if day == D then d = d + tokens end
  r, cr, t, ct, u, cu = r + requests, cr + requests, t + tokens, ct + tokens, u + usd, cu + usd
  redis.call('SET', key, struct.pack(F, b, r, t, cr, ct, D, d, s, ub, u, cu, ou, p), 'EX', 90000)
end
return 1
"""
)

# KEYS: the workers (name → lease's end), the time of the last heartbeat of any. ARGV: the settings, this worker's name,
# the lease, the prefix of the workers' hashes, how many records to give back at most. Replies: now, workers, given
# back, and 1 when there is more to do.
BEAT = Script(
    _FORMATS
    + _WINDOWS
    + _ADJUST
    + _GIVE_BACK
    + """
local _, keep, _, hour_keep = struct.unpack(SETTINGS, ARGV[1])
local me, lease_s, prefix, most = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local now = clock()
local last = tonumber(redis.call('GET', KEYS[2]) or now)
redis.call('SET', KEYS[2], string.format('%.6f', now))
redis.call('ZADD', KEYS[1], now + lease_s, me)
redis.call('EXPIRE', prefix .. me, 172800)
if now - last > lease_s / 2 then
  -- Nobody was heard: rather the store was away than all workers are dead. They get another lease to come back.
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now + lease_s)) do
    redis.call('ZADD', KEYS[1], now + lease_s, worker)
  end
end
local given_back, more = 0, 0
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if dead then
  local flat = redis.call('HRANDFIELD', prefix .. dead, most, 'WITHVALUES')
  for i = 1, #flat, 2 do
    give_back(flat[i + 1], keep, hour_keep, 0)
    redis.call('HDEL', prefix .. dead, flat[i])
    given_back = given_back + 1
  end
  more = 1
  if given_back == 0 then redis.call('ZREM', KEYS[1], dead) end
end
return struct.pack('<dddd', now, redis.call('ZCARD', KEYS[1]), given_back, more)
"""
)

SCRIPTS = (RESERVE, SETTLE, RELEASE, ADD, BEAT)

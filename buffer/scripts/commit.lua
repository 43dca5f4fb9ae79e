-- Decides on one trajectory whose payload a SET NX of the same transaction has written.
-- ARGV: id, bytes, now, capacity and policy of the recipe, actor, sequence number, task, attempt, is last, group, group size,
-- policy versions, attributes (see LIVE in keys.py), weight in millionths (0: none), draw of a unit exponential.
-- Returns {verdict, field, problem}.
local id, bytes, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local actor, seq = ARGV[6], tonumber(ARGV[7])
local index, attempt, is_last = ARGV[8], tonumber(ARGV[9]), ARGV[10] == '1'
local group, size = ARGV[11], tonumber(ARGV[12])
local weight, draw = tonumber(ARGV[15]), tonumber(ARGV[16])

local function reject(verdict, field, problem)
  redis.call('UNLINK', K.payload .. id)
  return { verdict, field or '', problem or '' }
end

local function finish()
  decide(actor, seq)
  if is_last then end_task(index, attempt, now) end
end

-- Makes room by the policy, whole ready units in its order; evicts nothing where that would not be enough.
local function make_room()
  local capacity, policy = tonumber(setting('capacity_bytes', ARGV[4])), setting('when_full', ARGV[5])
  local wanted = need(bytes, group, size)
  local free, evictable = room_left(capacity, policy)
  local joins = size > 1 and redis.call('ZSCORE', K.ready, 'g:' .. group)
  if not fits(wanted, free, evictable, joins and held_by('g:' .. group) or 0) then return false end
  local order, passed = policy == 'drop_stalest' and K.ready or K.arrived, 0
  while wanted > free do
    local unit = redis.call('ZRANGE', order, passed, passed)[1]
    if not unit then return false end
    if unit == 'g:' .. group then
      passed = passed + 1
    else
      for _, member in ipairs(members(unit)) do
        local _, held = describe(member)
        drop(member, held, 'evicted')
        stat('ready', -1)
        free = free + held
      end
      unready({ unit })
    end
  end
  return true
end

if redis.call('HEXISTS', K.live, id) == 1 then
  stat('duplicates', 1)
  return { 'duplicate', '', '' }
end
local refusal = redis.call('HGET', K.refused, id)
if refusal then return reject('refused', string.match(refusal, '^(.-)\n(.*)$')) end
if redis.call('ZSCORE', K.seen, id) then
  stat('duplicates', 1)
  return reject('duplicate')
end

local oldest = math.huge
for version in string.gmatch(ARGV[13], '%d+') do
  local step = redis.call('HGET', K.version_steps, version)
  if not step then
    local problem = 'version ' .. version .. ' was never published'
    refuse(id, 'policy_versions', problem, now)
    finish()
    return reject('refused', 'policy_versions', problem)
  end
  oldest = math.min(oldest, tonumber(step))
end

local floor = redis.call('HGET', K.learner, 'floor')
if floor and oldest < tonumber(floor) and decided(actor, seq) then
  -- `seen` has forgotten ids as old as this one; the sequence number tells a late resend from a first arrival.
  stat('duplicates', 1)
  return reject('duplicate')
end
local bound = stale_below()
if oldest < bound then
  -- The bound moves with `max_staleness`, so a resend might not be stale any more.
  redis.call('ZADD', K.seen, oldest, id)
  stat('stale', 1)
  finish()
  return reject('stale', 'policy_versions', 'oldest learner step ' .. oldest .. ' is below ' .. bound)
end

if not make_room() then return reject('full') end

-- Not %s, which ends at a zero byte.
redis.call('HSET', K.live, id, string.format('%d:%d:', oldest, bytes) .. ARGV[14] .. group)
redis.call('ZADD', K.seen, oldest, id)
local arrival = stat('stored', 1)
stat('bytes', bytes)
if size == 1 then
  enter(id, oldest, arrival, weight, draw)
  stat('ready', 1)
else
  local key = K.group .. group
  redis.call('HSET', key, id, oldest)
  if redis.call('ZADD', K.ready, 'XX', 'LT', 'CH', oldest, 'g:' .. group) == 1
      or redis.call('ZSCORE', K.ready, 'g:' .. group) then
    stat('ready', 1)
  else
    local room = redis.call('HGET', key, 'room')
    local left = room and math.max(0, tonumber(room) - bytes) or bytes * (size - 1)
    redis.call('HSET', key, 'room', string.format('%d', left))
    stat('room', left - tonumber(room or '0'))
    redis.call('HSETNX', key, 'arrived', arrival)
    redis.call('HINCRBY', key, 'weight', string.format('%d', weight))
    redis.call('HSETNX', key, 'draw', ARGV[16])
    redis.call('ZADD', K.waiting, 'NX', now, group)
    stat('awaiting', 1)
    stat('awaiting_bytes', bytes)
    if is_last and redis.call('HINCRBY', key, 'last', 1) >= size then release(group) end
  end
end
wake()
if not is_last then
  local current, fragments, owner = task(index)
  if current == attempt then redis.call('HSET', K.tasks, index, attempt .. ':' .. fragments + 1 .. ':' .. owner) end
end
finish()
return { 'stored', '', '' }

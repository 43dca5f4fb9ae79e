-- In front of every script. KEYS[1] is the run's prefix; K.<name> is the key of that name, see keys.py.

local function stat(field, by)
  -- Redis takes Lua's -0 for no integer, Valkey does not mind.
  return redis.call('HINCRBY', K.stat, field, string.format('%d', by))
end

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or '0')
end

-- The live value of a setting, or else the recipe's.
local function setting(name, recipe)
  local live = redis.call('HGET', K.settings, name)
  if live then return cjson.decode('[' .. live .. ']')[1] end
  return recipe
end

-- Step, bytes, group and success of a trajectory that has a payload.
local function describe(id)
  local step, bytes, success, length, names = string.match(
    redis.call('HGET', K.live, id), '^(-?%d+):(%d+):[^:]*:(%d):%d+:[%d/]+:(%d+):(.*)$')
  return tonumber(step), tonumber(bytes), string.sub(names, tonumber(length) + 1), success == '1'
end

-- Frees a payload and counts the trajectory under its fate; of a filtered one the reason is counted too.
local function drop(id, bytes, fate, reason)
  redis.call('UNLINK', K.payload .. id)
  redis.call('HDEL', K.live, id)
  stat('bytes', -bytes)
  stat(fate, 1)
  if fate == 'filtered' then redis.call('HINCRBY', K.filtered_reasons, reason, 1) end
end

-- Makes a unit claimable. A weight of 0: the ingest has no priority function.
local function enter(unit, oldest, arrival, weight, draw)
  redis.call('ZADD', K.ready, oldest, unit)
  redis.call('ZADD', K.arrived, arrival, unit)
  if weight <= 0 then return end
  redis.call('HSET', K.weights, unit, string.format('%d', weight))
  stat('weight', weight)
  -- Keys start where the drawing has come to: an exponential has no memory, so units that stayed behind and units that
  -- arrive are drawn in proportion to their weights.
  redis.call('ZADD', K.picks, number(K.stat, 'drawn') + draw / weight, unit)
end

-- Calls `visit` with at most 1000 items at a time: a command's arguments go over Lua's stack.
local function in_chunks(items, visit)
  for first = 1, #items, 1000 do
    local chunk = {}
    for i = first, math.min(first + 999, #items) do chunk[#chunk + 1] = items[i] end
    visit(chunk)
  end
end

-- The units are claimed, evicted or filtered: nothing of them stays but the payloads.
local function unready(units)
  in_chunks(units, function(chunk)
    redis.call('ZREM', K.ready, unpack(chunk))
    redis.call('ZREM', K.arrived, unpack(chunk))
    local ranked, total = {}, 0
    for i, weight in ipairs(redis.call('HMGET', K.weights, unpack(chunk))) do
      if string.sub(chunk[i], 1, 2) == 'g:' then redis.call('DEL', K.group .. string.sub(chunk[i], 3)) end
      if weight then
        ranked[#ranked + 1] = chunk[i]
        total = total + tonumber(weight)
      end
    end
    if #ranked == 0 then return end
    redis.call('HDEL', K.weights, unpack(ranked))
    redis.call('ZREM', K.picks, unpack(ranked))
    stat('weight', -total)
  end)
end

-- Trajectories of a unit of `ready`, in a fixed order. Ids have 26 characters, the other fields of a group fewer.
local function members(unit)
  if string.sub(unit, 1, 2) ~= 'g:' then return { unit } end
  local ids = {}
  for _, field in ipairs(redis.call('HKEYS', K.group .. string.sub(unit, 3))) do
    if #field == 26 then ids[#ids + 1] = field end
  end
  table.sort(ids)
  return ids
end

-- Wakes the learner when as many are ready as it waits for.
local function wake()
  local wanted = number(K.learner, 'want')
  if wanted > 0 and number(K.stat, 'ready') >= wanted and redis.call('LLEN', K.wake) == 0 then
    redis.call('RPUSH', K.wake, 1)
  end
end

-- Makes a waiting group ready as it is and gives back what is left of its room.
local function release(group)
  local key = K.group .. group
  local oldest, count, total = math.huge, 0, 0
  for _, id in ipairs(members('g:' .. group)) do
    local born, bytes = describe(id)
    oldest = math.min(oldest, born)
    count = count + 1
    total = total + bytes
  end
  stat('room', -number(key, 'room'))
  redis.call('HDEL', key, 'room')
  redis.call('ZREM', K.waiting, group)
  enter('g:' .. group, oldest, number(key, 'arrived'), math.floor(number(key, 'weight') / count), number(key, 'draw'))
  stat('awaiting', -count)
  stat('awaiting_bytes', -total)
  stat('ready', count)
end

-- Drops all of a ready unit.
local function drop_unit(unit, reason)
  for _, id in ipairs(members(unit)) do
    local _, bytes = describe(id)
    drop(id, bytes, 'filtered', reason)
    stat('ready', -1)
  end
  unready({ unit })
end

-- Forgets an unclaimed trajectory that was kept for replay.
local function forget(id)
  local bytes = string.match(redis.call('HGET', K.replay_live, id), '^-?%d+:(%d+)')
  redis.call('ZREM', K.replay, id)
  redis.call('HDEL', K.replay_live, id)
  redis.call('UNLINK', K.replay_payload .. id)
  stat('replay_bytes', -tonumber(bytes))
end

-- Holds the replay store to its bound, the oldest first. Claimed ones are not in the set: their payloads stay.
local function trim_replay()
  local bound = number(K.learner, 'replay_max_bytes')
  while number(K.stat, 'replay_bytes') > bound do
    local oldest = redis.call('ZRANGE', K.replay, 0, 0)[1]
    if not oldest then return end
    forget(oldest)
  end
end

-- Bytes a trajectory adds to those spoken for: the first of a group speaks for all, later ones use that room.
local function need(bytes, group, size)
  if size == 1 or redis.call('ZSCORE', K.ready, 'g:' .. group) then return bytes end
  local room = redis.call('HGET', K.group .. group, 'room')
  if not room then return bytes * size end
  return math.max(0, bytes - tonumber(room))
end

-- Bytes that are free, and bytes of ready units that the policy may evict: claimed ones and the members of incomplete
-- groups never are.
local function room_left(capacity, policy)
  local bytes = number(K.stat, 'bytes')
  local free = capacity - bytes - number(K.stat, 'room')
  if policy == 'block' then return free, 0 end
  return free, bytes - number(K.stat, 'claimed_bytes') - number(K.stat, 'awaiting_bytes')
end

-- Payload bytes of a unit.
local function held_by(unit)
  local total = 0
  for _, id in ipairs(members(unit)) do
    local _, bytes = describe(id)
    total = total + bytes
  end
  return total
end

-- Whether bytes fit, where need be into the room of ready units but their own: nobody is evicted for its own sake.
local function fits(wanted, free, evictable, own)
  return wanted == 0 or wanted <= free or wanted <= free + evictable - own
end

-- Learner step of the oldest token below which data is too stale for every claim to come.
local function stale_below()
  local claimed = redis.call('HGET', K.learner, 'claimed')
  if not claimed then return -math.huge end
  return tonumber(claimed) - tonumber(setting('max_staleness', redis.call('HGET', K.learner, 'max_staleness')))
end

-- Whether an actor's sequence number is decided. Exact for ever, where `seen` forgets.
local function decided(actor, seq)
  return seq <= number(K.seq_low, actor) or redis.call('ZSCORE', K.seq_above .. actor, seq)
end

-- Past 10,000 actors new ones are not followed: names that somebody makes up must not make the hash grow.
local function decide(actor, seq)
  if redis.call('HLEN', K.seq_low) >= 10000 and redis.call('HEXISTS', K.seq_low, actor) == 0 then return end
  local low, above = number(K.seq_low, actor), K.seq_above .. actor
  if seq <= low then return end
  redis.call('ZADD', above, seq, seq)
  -- A number that never comes must not make the set grow: past 4096 open ones the lowest gap counts as decided.
  if redis.call('ZCARD', above) > 4096 then low = tonumber(redis.call('ZRANGE', above, 0, 0)[1]) - 1 end
  while redis.call('ZREM', above, low + 1) == 1 do low = low + 1 end
  redis.call('HSET', K.seq_low, actor, low)
end

-- Records a refusal, once per id, so that a resend gets the same answer; the oldest of 100,000 are forgotten.
local function refuse(id, field, problem, now)
  redis.call('HSET', K.refused, id, field .. '\n' .. problem)
  redis.call('ZADD', K.refused_at, now, id)
  if redis.call('ZCARD', K.refused_at) > 100000 then
    redis.call('HDEL', K.refused, redis.call('ZPOPMIN', K.refused_at)[1])
  end
  stat('refused', 1)
  local label = string.gsub(field, '%[[^%]]*%]', '[]')
  redis.call('HINCRBY', K.refused_fields, label, 1)
end

-- Attempt, stored fragments and actor of an unfinished task.
local function task(index)
  local attempt, fragments, actor = string.match(redis.call('HGET', K.tasks, index) or '', '^(%d+):(%d+):(.*)$')
  return tonumber(attempt), tonumber(fragments), actor
end

-- The attempt has delivered all of its episode.
local function end_task(index, attempt, now)
  if task(index) ~= attempt then return end
  local started = redis.call('HGET', K.task_starts, index)
  if started then
    local took = math.max(0, now - tonumber(started))
    local mean = tonumber(redis.call('HGET', K.pace, 'episode_s') or took)
    redis.call('HSET', K.pace, 'episode_s', string.format('%.9f', mean + (took - mean) / 32))
    redis.call('HDEL', K.task_starts, index)
  end
  redis.call('HDEL', K.tasks, index)
  redis.call('ZREM', K.task_leases, index)
  redis.call('ZREM', K.task_retry, index)
end

-- The attempt ended without result: first in line for the next attempt, or given up.
local function return_task(index, max_attempts)
  redis.call('ZREM', K.task_leases, index)
  redis.call('HDEL', K.task_starts, index)
  local attempt, fragments = task(index)
  if not attempt then return end
  if attempt + 1 < max_attempts then
    redis.call('ZADD', K.task_retry, index, index)
    return
  end
  redis.call('HDEL', K.tasks, index)
  stat('tasks_abandoned', 1)
  if fragments > 0 then stat('episodes_abandoned', 1) end
end

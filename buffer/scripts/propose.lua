-- Candidates for the batch of a learner step, in order. Writes when the step was asked for, and evicts what is too stale.
-- ARGV: step, trajectories wanted, candidates to look at, order, seed, trajectories of those wanted to be replayed.
-- Returns the manifest sealed before, or nothing while too few are ready, or
-- {units ready, their total weight, candidates, replayed}: candidates are unit, weight and members, flat; members and
-- replayed are id and attributes, flat.
local step, wanted, limit, order = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local sealed = redis.call('GET', K.manifest .. ARGV[1])
if redis.call('HGET', K.pace, 'asked') ~= ARGV[1] then
  local seconds, micros = unpack(redis.call('TIME'))
  redis.call('HSET', K.pace, 'asked', ARGV[1], 'asked_at', string.format('%d.%06d', seconds, micros),
    'waiting', sealed and 0 or 1)
end
if sealed then return sealed end
local registered = redis.call('HGET', K.learner, 'max_staleness')
if not registered then return redis.error_reply('ERR claim before register') end
local floor = step - tonumber(setting('max_staleness', registered))
local drops_partial = redis.call('HGET', K.config, 'partial_groups') == '"drop"'

-- Units whose oldest member is stale lose their stale members; the others stay, or are a partial group.
for _, unit in ipairs(redis.call('ZRANGE', K.ready, '-inf', '(' .. floor, 'BYSCORE')) do
  local oldest = math.huge
  for _, id in ipairs(members(unit)) do
    local born, bytes, group = describe(id)
    if born < floor then
      drop(id, bytes, 'stale')
      stat('ready', -1)
      if unit ~= id then redis.call('HDEL', K.group .. group, id) end
    else
      oldest = math.min(oldest, born)
    end
  end
  if oldest == math.huge then
    unready({ unit })
  elseif drops_partial then
    drop_unit(unit, 'partial_group')
  else
    redis.call('ZADD', K.ready, oldest, unit)
  end
end
local replay_floor = step - number(K.learner, 'replay_max_staleness')
for _, id in ipairs(redis.call('ZRANGE', K.replay, '-inf', '(' .. replay_floor, 'BYSCORE')) do forget(id) end

local replayed = math.min(tonumber(ARGV[6]), redis.call('ZCARD', K.replay))
if number(K.stat, 'ready') < wanted - replayed then
  redis.call('HSET', K.learner, 'want', wanted - replayed)
  return false
end

local candidates, count, seen = {}, 0, {}
local function look(units)
  if #units == 0 then return end
  local weights = redis.call('HMGET', K.weights, unpack(units))
  for i, unit in ipairs(units) do
    if count >= limit then return end
    if not seen[unit] then
      seen[unit] = true
      local described = {}
      for _, id in ipairs(members(unit)) do
        described[#described + 1] = id
        described[#described + 1] = redis.call('HGET', K.live, id)
        count = count + 1
      end
      candidates[#candidates + 1] = unit
      candidates[#candidates + 1] = weights[i] or '0'
      candidates[#candidates + 1] = described
    end
  end
end
local function pages(key, ...)
  local page = 0
  repeat
    local units = redis.call('ZRANGE', key, page, page + 255, ...)
    look(units)
    page = page + 256
  until count >= limit or #units == 0
end
if order == 'oldest' then
  pages(K.ready)
elseif order == 'uniform' then
  -- The server draws without replacement but in no random order.
  local units = redis.call('ZRANDMEMBER', K.ready, limit)
  math.randomseed(tonumber(ARGV[5]))
  for i = #units, 2, -1 do
    local j = math.random(i)
    units[i], units[j] = units[j], units[i]
  end
  in_chunks(units, look)
else
  if order == 'priority' then pages(K.picks) end
  -- Of `priority` those that were stored before the ingest had a priority function.
  if count < limit then pages(K.ready, 'REV') end
end

local again = {}
if replayed > 0 then
  for _, id in ipairs(redis.call('ZRANDMEMBER', K.replay, replayed)) do
    again[#again + 1] = id
    again[#again + 1] = redis.call('HGET', K.replay_live, id)
  end
end
return { redis.call('ZCARD', K.ready), redis.call('HGET', K.stat, 'weight') or '0', candidates, again }

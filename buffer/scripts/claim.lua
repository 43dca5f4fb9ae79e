-- Seals the manifest of a learner step, or returns the one sealed before.
-- ARGV: step, trajectories, order (freshest or oldest), now. Returns JSON, or nothing while too few are ready.
local step, wanted, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local sealed = redis.call('GET', K.manifest .. ARGV[1])
if sealed then return sealed end
local registered = redis.call('HGET', K.learner, 'max_staleness')
if not registered then return redis.error_reply('ERR claim before register') end
local floor = step - tonumber(setting('max_staleness', registered))

-- Units whose oldest member is stale lose their stale members; the others stay.
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
  if oldest < math.huge then
    redis.call('ZADD', K.ready, oldest, unit)
  else
    unready(unit)
  end
end

if number(K.stat, 'ready') < wanted then
  redis.call('HSET', K.learner, 'want', wanted)
  return false
end

-- Whole units in order, passing over those that would exceed the number; where the sizes do not add up, one is taken
-- after all, so that odd groups cannot block the learner.
local taken, count, skipped = {}, 0, nil
local function take(unit, ids)
  taken[#taken + 1] = { unit, ids }
  count = count + #ids
end
local page = 0
while count < wanted do
  local units = ARGV[3] == 'oldest' and redis.call('ZRANGE', K.ready, page, page + 255)
    or redis.call('ZRANGE', K.ready, page, page + 255, 'REV')
  if #units == 0 then break end
  for _, unit in ipairs(units) do
    local ids = members(unit)
    if count + #ids <= wanted then
      take(unit, ids)
    elseif not skipped then
      skipped = { unit, ids }
    end
    if count == wanted then break end
  end
  page = page + 256
end
if count < wanted then take(skipped[1], skipped[2]) end

local entries, total = {}, 0
for _, item in ipairs(taken) do
  local unit, ids = item[1], item[2]
  for _, id in ipairs(ids) do
    local born, bytes, group = describe(id)
    entries[#entries + 1] = {
      trajectory_id = id, num_bytes = bytes, oldest_step = born, staleness = math.max(0, step - born), group_id = group,
    }
    total = total + bytes
  end
  unready(unit)
end
stat('ready', -count)
stat('claimed', count)
stat('claimed_bytes', total)
redis.call('HSET', K.claims, step, count)
redis.call('HSET', K.untrained, step, count)
redis.call('HSET', K.learner, 'want', 0, 'claimed', math.max(step, number(K.learner, 'claimed')))
if floor > number(K.learner, 'floor') then
  redis.call('HSET', K.learner, 'floor', floor)
  redis.call('ZREMRANGEBYSCORE', K.seen, '-inf', '(' .. floor)
end
local manifest = cjson.encode({ step = step, entries = entries, sealed_at = now })
redis.call('SET', K.manifest .. ARGV[1], manifest)
return manifest

-- Decides on candidates: seals the manifest of a learner step, drops what was filtered. All of it or, where a candidate
-- is not what it was when it was proposed, nothing.
-- ARGV: step, manifest (empty: only drop), JSON of {units: [{unit, take, keep, drop}], replay, num_bytes, drawn}: ids to
-- take and to leave in place, ids to drop by reason, ids to replay, bytes taken, and whether units were drawn by key.
-- Returns {manifest, units and ids that changed}, the manifest empty where none was sealed.
local sealed = redis.call('GET', K.manifest .. ARGV[1])
if sealed then return { sealed, {} } end
local request = cjson.decode(ARGV[3])
local step = tonumber(ARGV[1])
local floor = step - tonumber(setting('max_staleness', redis.call('HGET', K.learner, 'max_staleness')))

local units, scores, drawn = {}, {}, number(K.stat, 'drawn')
for i, item in ipairs(request.units) do units[i] = item.unit end
in_chunks(units, function(chunk)
  for _, score in ipairs(redis.call('ZMSCORE', K.ready, unpack(chunk))) do scores[#scores + 1] = score end
  if not request.drawn then return end
  for _, key in ipairs(redis.call('ZMSCORE', K.picks, unpack(chunk))) do drawn = math.max(drawn, tonumber(key or '0')) end
end)

local function is_same(item, score)
  if not score or (#item.take > 0 and tonumber(score) < floor) then return false end
  local known, open = {}, 0
  local function note(ids)
    for _, id in ipairs(ids) do
      known[id] = true
      open = open + 1
    end
  end
  note(item.take)
  note(item.keep)
  for _, ids in pairs(item.drop) do note(ids) end
  for _, id in ipairs(members(item.unit)) do
    if not known[id] then return false end
    open = open - 1
  end
  return open == 0
end
local changed = {}
for i, item in ipairs(request.units) do
  if not is_same(item, scores[i]) then changed[#changed + 1] = item.unit end
end
for _, id in ipairs(request.replay) do
  if not redis.call('ZSCORE', K.replay, id) then changed[#changed + 1] = id end
end
if #changed > 0 then return { '', changed } end

local count, gone = 0, {}
for _, item in ipairs(request.units) do
  for reason, ids in pairs(item.drop) do
    for _, id in ipairs(ids) do
      local _, bytes, group = describe(id)
      drop(id, bytes, 'filtered', reason)
      stat('ready', -1)
      if item.unit ~= id then redis.call('HDEL', K.group .. group, id) end
    end
  end
  count = count + #item.take
  if #item.keep == 0 then
    gone[#gone + 1] = item.unit
  else
    local oldest = math.huge
    for _, id in ipairs(item.keep) do oldest = math.min(oldest, (describe(id))) end
    redis.call('ZADD', K.ready, oldest, item.unit)
  end
end
unready(gone)
redis.call('HSET', K.stat, 'drawn', string.format('%.17g', drawn))
if ARGV[2] == '' then return { '', {} } end

for _, id in ipairs(request.replay) do redis.call('ZREM', K.replay, id) end
stat('ready', -count)
stat('claimed', count)
stat('claimed_bytes', request.num_bytes)
local filtered, before = number(K.stat, 'filtered'), number(K.pace, 'filtered_before')
redis.call('HSET', K.pace, 'fresh_share', count / (count + #request.replay), 'filtered_before', filtered,
  'filtered_last', filtered - before)
if redis.call('HGET', K.pace, 'asked') == ARGV[1] then redis.call('HSET', K.pace, 'waiting', 0) end
redis.call('HSET', K.claims, ARGV[1], count)
redis.call('HSET', K.untrained, ARGV[1], count)
redis.call('HSET', K.learner, 'want', 0, 'claimed', math.max(step, number(K.learner, 'claimed')))
if floor > number(K.learner, 'floor') then
  redis.call('HSET', K.learner, 'floor', floor)
  redis.call('ZREMRANGEBYSCORE', K.seen, '-inf', '(' .. floor)
end
redis.call('SET', K.manifest .. ARGV[1], ARGV[2])
return { ARGV[2], {} }

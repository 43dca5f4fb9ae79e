-- Which of several trajectories fit below the capacity, in order; writes nothing.
-- ARGV: capacity and policy of the recipe, then per trajectory bytes, group, group size. Returns 1 or 0 for each: what
-- is 1 `commit` stores or decides otherwise, but never finds the buffer full.
local capacity, policy = tonumber(setting('capacity_bytes', ARGV[1])), setting('when_full', ARGV[2])
local free, evictable = room_left(capacity, policy)
local evicting, groups, answers = false, {}, {}

-- A group as those before in this batch leave it: ready with its bytes, waiting with its room, or new.
local function state(group)
  if not groups[group] then
    local key = 'g:' .. group
    local is_ready = redis.call('ZSCORE', K.ready, key) and true
    local room = redis.call('HGET', K.group .. group, 'room')
    groups[group] = { is_ready = is_ready, held = is_ready and held_by(key) or 0, room = room and tonumber(room) }
    return groups[group], is_ready
  end
  return groups[group], true
end

local function admit(bytes, group, size)
  if size == 1 then return bytes, 0, bytes end
  local its, may_go = state(group)
  local whole = bytes * size
  -- A group that is ready, or completed by this batch, may be evicted for those before this one, which starts it anew:
  -- the worse of both is taken, and what it was too careful about comes with the next batch.
  if evicting and may_go then return whole, its.is_ready and its.held or 0, 0 end
  if its.is_ready then return bytes, its.held, bytes end
  return its.room and math.max(0, bytes - its.room) or whole, 0, 0
end

for i = 3, #ARGV, 3 do
  local bytes, group, size = tonumber(ARGV[i]), ARGV[i + 1], tonumber(ARGV[i + 2])
  local wanted, own, ready_at_once = admit(bytes, group, size)
  local fit = fits(wanted, free, evictable, own)
  if fit then
    evicting = evicting or wanted > free
    free = free - wanted
    if policy ~= 'block' then evictable = evictable + ready_at_once end
    if size > 1 then
      local its = groups[group]
      its.held = its.held + bytes
      its.room = its.room and math.max(0, its.room - bytes) or bytes * (size - 1)
    end
  end
  answers[#answers + 1] = fit and 1 or 0
end
return answers

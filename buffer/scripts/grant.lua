-- Leases tasks to an actor: returned ones first, then new ones.
-- ARGV: actor, how many, end of the lease, now. Returns index and attempt of each, flat.
local actor, granted = ARGV[1], {}
for _ = 1, tonumber(ARGV[2]) do
  local index = redis.call('ZPOPMIN', K.task_retry)[1]
  local attempt = 0
  if index then
    local last, fragments = task(index)
    attempt = last + 1
    if fragments > 0 then stat('episodes_abandoned', 1) end
  else
    index = redis.call('INCR', K.task_next) - 1
  end
  redis.call('HSET', K.tasks, index, attempt .. ':0:' .. actor)
  redis.call('ZADD', K.task_leases, ARGV[3], index)
  redis.call('HSET', K.task_starts, index, ARGV[4])
  granted[#granted + 1] = tonumber(index)
  granted[#granted + 1] = attempt
end
return granted

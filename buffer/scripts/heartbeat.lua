-- Takes in an actor's heartbeat: its side of the accounting, its leases, its engines.
-- ARGV: actor, incarnation, journalled, in flight, now, end of the leases, end of the engines' leases, closing,
-- most attempts at a task, number of running tasks, those, then url, kind and incarnation of each engine.
-- Returns 1, or 0 for a new actor past the first 10,000.
local actor, now, closing = ARGV[1], tonumber(ARGV[5]), ARGV[8] == '1'
local journalled = tonumber(ARGV[3])
local last = redis.call('HGET', K.actors, actor)
-- Names that somebody makes up must not make the hash grow; see decide().
if not last and redis.call('HLEN', K.actors) >= 10000 then return 0 end
if last then journalled = math.max(journalled, cjson.decode(last).journalled) end
redis.call('HSET', K.actors, actor, cjson.encode({
  incarnation = ARGV[2], journalled = journalled, in_flight = tonumber(ARGV[4]), at = now, closing = closing,
}))

local first_engine = 11 + tonumber(ARGV[10])
if closing then
  local tasks = redis.call('HGETALL', K.tasks)
  for i = 1, #tasks, 2 do
    local _, _, owner = task(tasks[i])
    if owner == actor then return_task(tasks[i], tonumber(ARGV[9])) end
  end
else
  for i = 11, first_engine - 1 do
    local _, _, owner = task(ARGV[i])
    if owner == actor then
      -- A task that was returned while its actor was silent goes on, unless somebody else has it by now.
      redis.call('ZREM', K.task_retry, ARGV[i])
      redis.call('ZADD', K.task_leases, ARGV[6], ARGV[i])
    end
  end
end

for i = first_engine, #ARGV, 3 do
  local url, incarnation = ARGV[i], ARGV[i + 2]
  redis.call('HSET', K.engines, url, cjson.encode({ kind = ARGV[i + 1], incarnation = incarnation }))
  redis.call('ZADD', K.engine_leases, ARGV[7], url)
  -- A restarted engine has lost its weights: no traffic before the learner admits it anew.
  local admitted = redis.call('HGET', K.admitted, url)
  if admitted and cjson.decode(admitted).incarnation ~= incarnation then redis.call('HDEL', K.admitted, url) end
end
return 1

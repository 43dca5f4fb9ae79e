-- A durable checkpoint holds the step: frees its payloads, or keeps those of successes for replay.
-- ARGV: step, then ids that a filter kept out of training.
local sealed = redis.call('GET', K.manifest .. ARGV[1])
if not sealed then return 0 end
local filtered = {}
for i = 2, #ARGV do filtered[ARGV[i]] = true end
local keeps = number(K.learner, 'replay_max_bytes') > 0

local function keep(id, bytes, born)
  redis.call('RENAME', K.payload .. id, K.replay_payload .. id)
  redis.call('HSET', K.replay_live, id, redis.call('HGET', K.live, id))
  redis.call('ZADD', K.replay, born, id)
  stat('replay_bytes', bytes)
end

local entries, freed = cjson.decode(sealed).entries, 0
for _, entry in ipairs(entries) do
  local id = entry.trajectory_id
  if entry.replayed then
    stat('replayed', 1)
    redis.call('ZADD', K.replay, entry.oldest_step, id)
  else
    local born, bytes, _, success = describe(id)
    if keeps and success and not filtered[id] then keep(id, bytes, born) end
    drop(id, bytes, filtered[id] and 'filtered' or 'trained', 'learner')
    stat('claimed', -1)
    stat('claimed_bytes', -bytes)
    freed = freed + 1
  end
end
trim_replay()
redis.call('DEL', K.manifest .. ARGV[1])
redis.call('HDEL', K.claims, ARGV[1])
redis.call('HDEL', K.untrained, ARGV[1])
return freed

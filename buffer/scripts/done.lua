-- A durable checkpoint holds the step: frees its payloads. ARGV: step, then ids that a filter kept out of training.
local sealed = redis.call('GET', K.manifest .. ARGV[1])
if not sealed then return 0 end
local filtered = {}
for i = 2, #ARGV do filtered[ARGV[i]] = true end
local entries = cjson.decode(sealed).entries
for _, entry in ipairs(entries) do
  drop(entry.trajectory_id, entry.num_bytes, filtered[entry.trajectory_id] and 'filtered' or 'trained')
  stat('claimed', -1)
  stat('claimed_bytes', -entry.num_bytes)
end
redis.call('DEL', K.manifest .. ARGV[1])
redis.call('HDEL', K.claims, ARGV[1])
redis.call('HDEL', K.untrained, ARGV[1])
return #entries

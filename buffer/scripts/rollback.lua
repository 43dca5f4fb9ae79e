-- A learner restarted from the checkpoint of a step: what it claimed after that is to be trained again. ARGV: step.
local step, again = tonumber(ARGV[1]), 0
local claims = redis.call('HGETALL', K.claims)
for i = 1, #claims, 2 do
  if tonumber(claims[i]) > step then
    redis.call('HSET', K.untrained, claims[i], claims[i + 1])
    again = again + 1
  end
end
redis.call('HSET', K.learner, 'step', step + 1)
return again

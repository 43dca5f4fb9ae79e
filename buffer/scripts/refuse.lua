-- Refuses a trajectory, once per id.
-- ARGV: id, field, problem, now, and where the payload could be decoded: actor, sequence number, task, attempt.
-- Returns {verdict, field, problem}: a resend gets the first answer.
local id = ARGV[1]
if redis.call('HEXISTS', K.live, id) == 1 or redis.call('ZSCORE', K.seen, id) then
  stat('duplicates', 1)
  return { 'duplicate', '', '' }
end
local refusal = redis.call('HGET', K.refused, id)
if refusal then return { 'refused', string.match(refusal, '^(.-)\n(.*)$') } end
refuse(id, ARGV[2], ARGV[3], ARGV[4])
if ARGV[5] then
  decide(ARGV[5], tonumber(ARGV[6]))
  end_task(ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[4]))
end
return { 'refused', ARGV[2], ARGV[3] }

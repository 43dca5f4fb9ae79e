-- An engine's weights match a version: it may take traffic while it is announced under that incarnation.
-- The step of its weights is kept with it: nobody may start episodes on weights that are late.
-- ARGV: url, incarnation, version. Returns 1, or 0 when the announcement has ended or is another incarnation's.
local announced = redis.call('HGET', K.engines, ARGV[1])
if not announced or cjson.decode(announced).incarnation ~= ARGV[2] then return 0 end
local step = redis.call('HGET', K.version_steps, ARGV[3])
redis.call('HSET', K.admitted, ARGV[1], cjson.encode({
  incarnation = ARGV[2], version = tonumber(ARGV[3]), step = step and tonumber(step) or nil,
}))
if tonumber(ARGV[3]) > tonumber(redis.call('HGET', K.learner, 'published') or '-1') then
  redis.call('HSET', K.learner, 'published', ARGV[3])
end
return 1

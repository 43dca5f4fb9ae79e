-- An engine may no longer take traffic. ARGV: url, incarnation. Returns 1 when that incarnation was admitted.
local admitted = redis.call('HGET', K.admitted, ARGV[1])
if not admitted or cjson.decode(admitted).incarnation ~= ARGV[2] then return 0 end
return redis.call('HDEL', K.admitted, ARGV[1])

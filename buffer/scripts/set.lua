-- Changes live settings and logs each change. ARGV: now, by, then name and value as JSON, empty for the recipe's.
for i = 3, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local old = redis.call('HGET', K.settings, name)
  local by = cjson.encode(ARGV[2])
  if value == '' then
    redis.call('HDEL', K.settings, name)
    redis.call('HDEL', K.settings_info, name)
  else
    redis.call('HSET', K.settings, name, value)
    redis.call('HSET', K.settings_info, name, string.format('{"at":%s,"by":%s}', ARGV[1], by))
  end
  -- Values are JSON already and stay as they were written.
  redis.call('LPUSH', K.settings_log, string.format('{"number":%d,"name":%s,"old":%s,"new":%s,"at":%s,"by":%s}',
    stat('settings_changes', 1), cjson.encode(name), old or 'null', value == '' and 'null' or value, ARGV[1], by))
end
redis.call('LTRIM', K.settings_log, 0, 999)
return 1

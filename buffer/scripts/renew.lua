-- After a time in which no heartbeat could be read, nobody is late. ARGV: end of tasks' leases, end of engines' leases.
for i, key in ipairs({ K.task_leases, K.engine_leases }) do
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZADD', key, 'GT', ARGV[i], member) end
end
return 1

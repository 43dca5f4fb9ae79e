-- The learner's pacing parameters. ARGV: incarnation, step to claim next, batch size, max staleness, publish every,
-- last step (0: none), capacity it needs in bytes, bytes kept for replay (0: none), their max staleness, size of a group
-- (0: not known), the recipe's order and filters as JSON.
redis.call('HSET', K.learner, 'incarnation', ARGV[1], 'step', ARGV[2], 'batch_size', ARGV[3], 'max_staleness', ARGV[4],
  'publish_every', ARGV[5], 'total_steps', ARGV[6], 'required_capacity_bytes', ARGV[7], 'replay_max_bytes', ARGV[8],
  'replay_max_staleness', ARGV[9], 'order', ARGV[11], 'filters', ARGV[12])
if ARGV[10] == '0' then
  redis.call('HDEL', K.learner, 'group_size')
else
  redis.call('HSET', K.learner, 'group_size', ARGV[10])
end
redis.call('HSETNX', K.pace, 'filtered_before', number(K.stat, 'filtered'))
trim_replay()
return 1

-- The learner's pacing parameters. ARGV: incarnation, step to claim next, batch size, max staleness, publish every.
redis.call('HSET', K.learner, 'incarnation', ARGV[1], 'step', ARGV[2], 'batch_size', ARGV[3], 'max_staleness', ARGV[4],
  'publish_every', ARGV[5])
return 1

-- An episode ended by an infrastructure failure. ARGV: task, attempt, actor, most attempts. Returns 1 once per attempt.
local attempt, _, owner = task(ARGV[1])
if attempt ~= tonumber(ARGV[2]) or owner ~= ARGV[3] or redis.call('ZSCORE', K.task_retry, ARGV[1]) then return 0 end
return_task(ARGV[1], tonumber(ARGV[4]))
stat('failed_episodes', 1)
return 1

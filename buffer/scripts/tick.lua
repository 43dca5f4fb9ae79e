-- What is due by the clock. ARGV: now, most attempts at a task, whether leases may end, group timeout of the recipe,
-- whether to drop partial groups.
-- Returns tasks returned, groups released, engines gone.
local now = tonumber(ARGV[1])
local function due(key, time)
  return redis.call('ZRANGE', key, '-inf', time, 'BYSCORE', 'LIMIT', 0, 1000)
end
local groups = due(K.waiting, now - tonumber(setting('group_timeout_s', ARGV[4])))
for _, group in ipairs(groups) do
  release(group)
  if ARGV[5] == '1' then drop_unit('g:' .. group, 'partial_group') end
end
if #groups > 0 then wake() end
if ARGV[3] ~= '1' then return { 0, #groups, 0 } end

local tasks = due(K.task_leases, now)
for _, index in ipairs(tasks) do return_task(index, tonumber(ARGV[2])) end
local engines = due(K.engine_leases, now)
for _, url in ipairs(engines) do
  redis.call('ZREM', K.engine_leases, url)
  redis.call('HDEL', K.engines, url)
  redis.call('HDEL', K.admitted, url)
end
return { #tasks, #groups, #engines }

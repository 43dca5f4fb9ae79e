-- Which of several trajectories fit below the capacity, in order; writes nothing.
-- ARGV: capacity, then per trajectory bytes, group, group size. Returns 1 or 0 for each.
local capacity = tonumber(ARGV[1])
local used = number(K.stat, 'bytes') + number(K.stat, 'room')
local fits = {}
for i = 2, #ARGV, 3 do
  local wanted = need(tonumber(ARGV[i]), ARGV[i + 1], tonumber(ARGV[i + 2]))
  local fit = wanted == 0 or used + wanted <= capacity
  if fit then used = used + wanted end
  fits[#fits + 1] = fit and 1 or 0
end
return fits

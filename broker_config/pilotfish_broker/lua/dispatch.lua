-- Choose the jobs whose doorbell may ring: never more than live workers have free slots.
-- KEYS: pending, dispatched, running, verify workers (id → slots), leases
-- ARGV: most ids to return
-- Returns the chosen ids, now in `dispatched`.
local now = now_ms()
local slots = 0
local workers = redis.call('HGETALL', KEYS[4])
for i = 1, #workers, 2 do
  local lease = redis.call('ZSCORE', KEYS[5], workers[i])
  if lease and tonumber(lease) > now then slots = slots + tonumber(workers[i + 1]) end
end
local free = slots - redis.call('SCARD', KEYS[3]) - redis.call('ZCARD', KEYS[2])
free = math.min(free, tonumber(ARGV[1]))
if free <= 0 then return {} end
local chosen = redis.call('ZPOPMIN', KEYS[1], free)
local ids = {}
for i = 1, #chosen, 2 do
  redis.call('ZADD', KEYS[2], now, chosen[i])
  ids[#ids + 1] = chosen[i]
end
return ids

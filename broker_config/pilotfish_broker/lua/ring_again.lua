-- The doorbells that have rung for longer than a while without an answer; they count as rung now.
-- KEYS: dispatched
-- ARGV: milliseconds to wait before ringing again, most ids to return
local now = now_ms()
local late = redis.call('ZRANGE', KEYS[1], '-inf', now - tonumber(ARGV[1]), 'BYSCORE',
                        'LIMIT', 0, ARGV[2])
for _, id in ipairs(late) do redis.call('ZADD', KEYS[1], now, id) end
return late

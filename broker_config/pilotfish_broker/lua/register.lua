-- Announce a worker and give it its first lease.
-- KEYS: leases, worker, workers of its kind and model
-- ARGV: worker, lease in ms, slots, then fields and values of the worker record
redis.call('ZADD', KEYS[1], now_ms() + tonumber(ARGV[2]), ARGV[1])
redis.call('HSET', KEYS[2], 'lease_ms', ARGV[2], unpack(ARGV, 4))
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
return 'ok'

-- Remove a worker that leaves, or whose lease has ended, once it owns nothing.
-- KEYS: leases, worker, workers of its kind and model, worker_jobs, inbox
-- ARGV: worker, nonce (of a worker that leaves by itself; empty for the reaper)
-- Returns 'forgotten' or 'kept'.
local lease = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ARGV[2] == '' then
  if lease and tonumber(lease) > now_ms() then return 'kept' end
elseif redis.call('HGET', KEYS[2], 'nonce') ~= ARGV[2] then
  return 'kept'
end
if redis.call('SCARD', KEYS[4]) > 0 then return 'kept' end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[5])
return 'forgotten'

-- Make this worker the owner of a queued job, in the next epoch.
-- KEYS: job, pending, dispatched, running, worker_jobs, leases
-- ARGV: id, worker, nonce
-- Returns {outcome, epoch}: 'claimed', 'yours' (the same owner asks again), 'held' (another owns
-- it), 'ended', 'missing', or 'unregistered' (this worker has no lease).
local r = redis.call('HMGET', KEYS[1], 'status', 'owner', 'epoch')
if not r[1] then
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
  return {'missing', 0}
end
if r[1] == 'running' then return {r[2] == ARGV[3] and 'yours' or 'held', tonumber(r[3])} end
if ENDED[r[1]] then
  redis.call('ZREM', KEYS[3], ARGV[1])
  return {'ended', tonumber(r[3])}
end
local now = now_ms()
local lease = redis.call('ZSCORE', KEYS[6], ARGV[2])
if not lease or tonumber(lease) <= now then return {'unregistered', 0} end
local epoch = tonumber(r[3]) + 1
redis.call('HSET', KEYS[1], 'status', 'running', 'owner', ARGV[3], 'worker', ARGV[2],
           'epoch', epoch, 'claimed_ms', now, 'seen_ms', now,
           'claimed_length', redis.call('HGET', KEYS[1], 'committed'))
redis.call('HSETNX', KEYS[1], 'started_ms', now)
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
redis.call('SADD', KEYS[5], ARGV[1])
return {'claimed', epoch}

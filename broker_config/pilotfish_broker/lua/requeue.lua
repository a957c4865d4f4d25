-- Take a job from an owner that is dead, or that lives but has not listed it for a lease.
-- KEYS: job, pending, running, worker_jobs, leases, tokens, done, worker
-- ARGV: id, worker (the owner it is to be taken from), most attempts, time to live in ms
-- Returns 'requeued', 'failed' (too many attempts), 'cancelled' or 'kept'.
local r = redis.call('HMGET', KEYS[1], 'status', 'worker', 'seen_ms', 'attempts',
                     'committed', 'claimed_length', 'cancel')
if r[1] ~= 'running' or r[2] ~= ARGV[2] then
  redis.call('SREM', KEYS[4], ARGV[1])
  return 'kept'
end
local now = now_ms()
local lease = redis.call('ZSCORE', KEYS[5], ARGV[2])
local dead = not lease or tonumber(lease) <= now
local length = redis.call('HGET', KEYS[8], 'lease_ms')  -- the owner's own, not the reaper's
if not dead and (not length or now - tonumber(r[3] or 0) <= 2 * tonumber(length)) then
  return 'kept'
end
local k = {job = KEYS[1], tokens = KEYS[6], running = KEYS[3], worker_jobs = KEYS[4],
           done = KEYS[7]}
-- whoever owned it must not take this end for its own
redis.call('HSET', KEYS[1], 'owner', '')
if r[7] then
  end_job(ARGV[1], k, 'cancelled', 'cancelled', '', ARGV[4])
  return 'cancelled'
end
-- only deaths in a row, each without a commit since the claim, speak against the job itself
if dead and r[5] ~= r[6] then redis.call('HSET', KEYS[1], 'attempts', 0) end
if dead and r[5] == r[6] then
  local attempts = redis.call('HINCRBY', KEYS[1], 'attempts', 1)
  if attempts >= tonumber(ARGV[3]) then
    end_job(ARGV[1], k, 'failed', 'error',
            'its worker died ' .. attempts .. ' times before it committed a token', ARGV[4])
    return 'failed'
  end
end
queue_again(ARGV[1], KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 'requeued'

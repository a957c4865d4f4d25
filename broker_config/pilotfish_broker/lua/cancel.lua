-- Cancel a queued job at once; flag a running one for its owner.
-- KEYS: job, pending, dispatched, tokens, running, worker_jobs, done
-- ARGV: id, time to live in ms
-- Returns 'cancelled', 'flagged', 'ended' or 'missing'.
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return 'missing' end
if ENDED[status] then return 'ended' end
if status == 'running' then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  return 'flagged'
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
end_job(ARGV[1], {job = KEYS[1], tokens = KEYS[4], running = KEYS[5], worker_jobs = KEYS[6],
                  done = KEYS[7]}, 'cancelled', 'cancelled', '', ARGV[2])
return 'cancelled'

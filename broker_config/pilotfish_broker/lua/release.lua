-- The owner gives a job back (drain, preemption by the operator); it counts as no attempt.
-- KEYS: job, pending, running, worker_jobs, tokens, done
-- ARGV: id, nonce, epoch, time to live in ms
-- Returns 'released', 'cancelled' (it was to be cancelled, so it ends instead) or 'fenced'.
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return 'fenced' end
if redis.call('HEXISTS', KEYS[1], 'cancel') == 1 then
  redis.call('HSET', KEYS[1], 'owner', '')
  end_job(ARGV[1], {job = KEYS[1], tokens = KEYS[5], running = KEYS[3], worker_jobs = KEYS[4],
                    done = KEYS[6]}, 'cancelled', 'cancelled', '', ARGV[4])
  return 'cancelled'
end
queue_again(ARGV[1], KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 'released'

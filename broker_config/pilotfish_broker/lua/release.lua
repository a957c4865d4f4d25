-- The owner gives a job back (drain, preemption by the operator); it counts as no attempt.
-- KEYS: job, pending, running, worker_jobs
-- ARGV: id, nonce, epoch
-- Returns 'released' or 'fenced'.
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return 'fenced' end
queue_again(ARGV[1], KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 'released'

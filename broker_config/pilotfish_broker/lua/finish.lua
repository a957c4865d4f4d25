-- Commit a job's last tokens and end it, in one step.
-- KEYS: job, tokens, running, worker_jobs, done
-- ARGV: id, nonce, epoch, expected length, count, ids, text, text length, drafted, accepted,
--       near ties, logprobs, prompt logprobs, status, finish reason, error, time to live in ms
-- Returns 'finished', 'already' (the same call again) or 'fenced' (nothing was changed).
local job = KEYS[1]
local r = redis.call('HMGET', job, 'status', 'owner', 'epoch')
if r[1] and ENDED[r[1]] and r[2] == ARGV[2] and r[3] == ARGV[3] then return 'already' end
if not owns(job, ARGV[2], ARGV[3]) then return 'fenced' end
local outcome = append(job, KEYS[2], {
  expected = tonumber(ARGV[4]), count = tonumber(ARGV[5]), ids = ARGV[6], text = ARGV[7],
  text_length = tonumber(ARGV[8]), drafted = tonumber(ARGV[9]), accepted = tonumber(ARGV[10]),
  near_ties = tonumber(ARGV[11]), logprobs = ARGV[12], prompt_logprobs = ARGV[13]})
if outcome == 'fenced' then return 'fenced' end
end_job(ARGV[1], {job = job, tokens = KEYS[2], running = KEYS[3], worker_jobs = KEYS[4],
                  done = KEYS[5]}, ARGV[14], ARGV[15], ARGV[16], ARGV[17])
return 'finished'

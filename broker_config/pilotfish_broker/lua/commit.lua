-- Commit one round of many jobs; where it succeeds, push the job's verdict frame.
-- KEYS: job and tokens of each job, then the inboxes of the draft workers concerned
-- ARGV: nonce, number of jobs, most entries in an inbox, its time to live in ms, then for each job
--       epoch, expected length, count, ids, text, text length, drafted, accepted, near ties,
--       logprobs, prompt logprobs, frame, inbox (an index from 1 among the inboxes; 0: no frame)
-- Returns for each job 'ok', 'already' (the same commit again), 'cancel' (committed, and the job
-- is to be cancelled) or 'fenced' (nothing was changed).
local jobs = tonumber(ARGV[2])
local entries, replies = {}, {}
for i = 1, jobs do
  local job, tokens, a = KEYS[2 * i - 1], KEYS[2 * i], 4 + (i - 1) * 13
  local outcome = 'fenced'
  if owns(job, ARGV[1], ARGV[a + 1]) then
    outcome = append(job, tokens, {
      expected = tonumber(ARGV[a + 2]), count = tonumber(ARGV[a + 3]), ids = ARGV[a + 4],
      text = ARGV[a + 5], text_length = tonumber(ARGV[a + 6]),
      drafted = tonumber(ARGV[a + 7]), accepted = tonumber(ARGV[a + 8]),
      near_ties = tonumber(ARGV[a + 9]), logprobs = ARGV[a + 10], prompt_logprobs = ARGV[a + 11]})
    local inbox = tonumber(ARGV[a + 13])
    if outcome == 'ok' and inbox > 0 then
      entries[inbox] = (entries[inbox] or '') .. ARGV[a + 12]
    end
    if outcome ~= 'fenced' and redis.call('HEXISTS', job, 'cancel') == 1 then outcome = 'cancel' end
  end
  replies[i] = outcome
end
for inbox, entry in pairs(entries) do
  local key = KEYS[2 * jobs + inbox]
  -- frames may be lost, so a key that takes none must not make the commits look undone
  if type(redis.pcall('RPUSH', key, entry)) == 'number' then
    redis.call('LTRIM', key, -tonumber(ARGV[3]), -1)
    redis.call('PEXPIRE', key, ARGV[4])
  end
end
return replies

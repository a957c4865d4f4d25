-- Renew a worker's lease, for all the jobs that it really holds.
-- KEYS: leases, worker, then the jobs it holds
-- ARGV: worker, nonce, lease in ms, then the epoch of each job
-- Returns {'lost'} when the worker is not known any more; else {'ok', then for each job 'ok',
-- 'cancel' or 'fenced'}.
if redis.call('HGET', KEYS[2], 'nonce') ~= ARGV[2] then return {'lost'} end
local now = now_ms()
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
local replies = {'ok'}
for i = 3, #KEYS do
  local outcome = 'fenced'
  if owns(KEYS[i], ARGV[2], ARGV[i + 1]) then
    redis.call('HSET', KEYS[i], 'seen_ms', now)
    outcome = redis.call('HEXISTS', KEYS[i], 'cancel') == 1 and 'cancel' or 'ok'
  end
  replies[#replies + 1] = outcome
end
return replies

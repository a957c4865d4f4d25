-- Record the prompt's token ids, which draft workers read, and the model that took the job up.
-- KEYS: job
-- ARGV: nonce, epoch, ids, fingerprint of the model
-- Returns 'ok', 'fenced', or 'other_model' when another model's tokens are committed already.
if not owns(KEYS[1], ARGV[1], ARGV[2]) then return 'fenced' end
local r = redis.call('HMGET', KEYS[1], 'fingerprint', 'committed')
if r[1] and r[1] ~= ARGV[4] and r[2] ~= '0' then return 'other_model' end
redis.call('HSET', KEYS[1], 'prompt_ids', ARGV[3], 'fingerprint', ARGV[4])
return 'ok'

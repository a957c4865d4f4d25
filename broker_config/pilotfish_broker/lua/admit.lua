-- Record the prompt's token ids, which draft workers read.
-- KEYS: job
-- ARGV: nonce, epoch, ids
if not owns(KEYS[1], ARGV[1], ARGV[2]) then return 'fenced' end
redis.call('HSET', KEYS[1], 'prompt_ids', ARGV[3])
return 'ok'

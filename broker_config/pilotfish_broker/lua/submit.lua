-- Write a job record and queue it; repeating the same submission changes nothing.
-- KEYS: job, pending, sequence
-- ARGV: id, spec, checksum of spec, model, priority, group
-- Returns 'created', 'exists', or 'conflict' when the id belongs to another spec.
local old = redis.call('HGET', KEYS[1], 'checksum')
if old then return old == ARGV[3] and 'exists' or 'conflict' end
local score = redis.call('INCR', KEYS[3]) - tonumber(ARGV[5]) * 1e13
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'checksum', ARGV[3], 'model', ARGV[4],
           'priority', ARGV[5], 'group', ARGV[6], 'score', string.format('%.0f', score),
           'status', 'queued', 'owner', '', 'worker', '', 'epoch', 0, 'attempts', 0,
           'committed', 0, 'visible', 0, 'rounds', 0, 'drafted', 0, 'accepted', 0, 'near_ties', 0,
           'submitted_ms', now_ms())
redis.call('ZADD', KEYS[2], string.format('%.0f', score), ARGV[1])
return 'created'

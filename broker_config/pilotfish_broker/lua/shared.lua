-- Put before every other script. Redis's own clock is the only clock that leases compare with.

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local ENDED = {succeeded = true, failed = true, cancelled = true, expired = true}

-- Does this incarnation own the job in this epoch?
local function owns(job, nonce, epoch)
  local r = redis.call('HMGET', job, 'status', 'owner', 'epoch')
  return r[1] == 'running' and r[2] == nonce and r[3] == epoch
end

-- The value of one field of a stream's entry; '' where it has none.
local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
  return ''
end

-- Append tokens at the expected length. Returns 'ok', 'already' or 'fenced'.
-- c: expected, count, ids, text, text_length, drafted, accepted, near_ties, logprobs,
--    prompt_logprobs
local function append(job, tokens, c)
  local length = tonumber(redis.call('HGET', job, 'committed'))
  if c.count == 0 and c.text_length == 0 and c.prompt_logprobs == '' then
    return length == c.expected and 'ok' or 'fenced'
  end
  if length == c.expected + c.count then
    local last = redis.call('XREVRANGE', tokens, '+', '-', 'COUNT', 1)[1]
    -- what has no tokens leaves the length as it is, so that it is known by all the rest; with
    -- tokens the rest follows from them, up to the last digits of log-probabilities
    if last and field(last, 'p') == tostring(c.expected) and field(last, 't') == c.ids
       and (c.count > 0 or (field(last, 'x') == c.text
                            and field(last, 'm') == c.prompt_logprobs)) then
      return 'already'
    end
  end
  if length ~= c.expected then return 'fenced' end
  local visible = redis.call('HGET', job, 'visible')
  local entry = {'p', c.expected, 't', c.ids, 'o', visible, 'x', c.text}
  for _, pair in ipairs({{'l', c.logprobs}, {'m', c.prompt_logprobs}}) do
    if pair[2] ~= '' then
      entry[#entry + 1] = pair[1]
      entry[#entry + 1] = pair[2]
    end
  end
  redis.call('XADD', tokens, '*', unpack(entry))
  redis.call('HINCRBY', job, 'committed', c.count)
  if c.text_length > 0 then redis.call('HINCRBY', job, 'visible', c.text_length) end
  if c.count > 0 then redis.call('HINCRBY', job, 'rounds', 1) end
  if c.drafted > 0 then
    redis.call('HINCRBY', job, 'drafted', c.drafted)
    redis.call('HINCRBY', job, 'accepted', c.accepted)
  end
  if c.near_ties > 0 then redis.call('HINCRBY', job, 'near_ties', c.near_ties) end
  return 'ok'
end

-- End a job: k has the keys job, tokens, running, worker_jobs, done.
local function end_job(id, k, status, reason, message, ttl)
  redis.call('HSET', k.job, 'status', status, 'finish_reason', reason, 'error', message,
             'finished_ms', now_ms())
  redis.call('XADD', k.tokens, '*', 'e', status)
  redis.call('PEXPIRE', k.job, ttl)
  redis.call('PEXPIRE', k.tokens, ttl)
  redis.call('SREM', k.running, id)
  redis.call('SREM', k.worker_jobs, id)
  if redis.call('HGET', k.job, 'group') ~= '' then
    redis.call('XADD', k.done, '*', 'job', id, 'status', status)
    redis.call('PEXPIRE', k.done, ttl)
  end
end

-- Put a job back among the queued ones, with its old place in the order.
local function queue_again(id, job, pending, running, worker_jobs)
  redis.call('HSET', job, 'status', 'queued', 'owner', '', 'worker', '')
  redis.call('SREM', running, id)
  redis.call('SREM', worker_jobs, id)
  redis.call('ZADD', pending, redis.call('HGET', job, 'score'), id)
end

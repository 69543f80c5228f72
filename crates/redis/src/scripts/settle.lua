-- Applies verdicts: each one whole or not at all. Arguments: window in ms, most dead letters told of, number of
-- verdicts; for each: group, its name, event, token, verdict, delay, failure, reason, inbox record, dead letter
-- (stream and fields), notices and follow-ups.
local window, n = arg(), num()
local answers = {}
for i = 1, n do
  local g, name, member, token, verdict, delay = arg(), arg(), arg(), arg(), arg(), num()
  local failure, reason, inbox = arg(), arg(), arg()
  local dlq, letter = arg(), {}
  for j = 1, num() do letter[j] = arg() end
  local notices, follow = {}, {}
  for j = 1, num() do notices[j] = read_event() end
  for j = 1, num() do follow[j] = read_event() end
  local text = redis.call('HGET', P .. 'st:' .. g, member)
  local kind, held, attempts, okey
  if text then
    local _
    kind, held, attempts, _, okey = read_state(text)
  end
  local answer = 'ok'
  if kind ~= 'F' or held ~= token then
    answer = 'lost'
  elseif tonumber(redis.call('ZSCORE', P .. 'lease:' .. g, member)) <= NOW then
    answer = 'lost'
  end
  local again = false
  if answer == 'ok' and inbox ~= '' then
    again = redis.call('ZSCORE', P .. 'inbox:' .. g, inbox) and true or false
    if again then follow = {} end
  end
  if answer == 'ok' then
    local seen = {}
    for _, event in ipairs(follow) do
      local refused = check(event, seen)
      if refused then
        answer = refused[1] .. ' ' .. refused[2]
        break
      end
    end
    if answer == 'ok' then
      -- A notice that was appended before, with another text, is there: once is enough.
      for _, event in ipairs(notices) do
        if check(event, seen) then event.none = true end
      end
    end
    if answer == 'ok' and dlq ~= '' and not is_stream(dlq) then answer = 'wrongtype ' .. dlq end
  end
  if answer == 'ok' then
    local id, key = of(member)
    -- The first write is one that a full memory does not refuse; the rest of the script may write then.
    if verdict == 'A' or verdict == 'S' or verdict == 'D' then
      finish(g, name, member, okey)
    elseif verdict == 'R' then
      redis.call('ZREM', P .. 'lease:' .. g, member)
      local before = redis.call('HGET', P .. 'fail:' .. g, member)
      redis.call('HSET', P .. 'fail:' .. g, member, before and before .. ',' .. failure or failure)
      wait_until(g, member, NOW + delay, attempts, okey)
      promote(g, okey)
      if delay == 0 then WAKE = true end
    else
      wait_until(g, member, NOW + delay, attempts - 1, okey)
      promote(g, okey)
      if delay == 0 then WAKE = true end
    end
    if verdict == 'S' then skip(g, member, reason) end
    if verdict == 'D' then
      if dlq ~= '' then
        local letter_id = redis.call('XADD', dlq, '*', unpack(letter))
        redis.call('HSET', P .. 'dead:' .. g, member, letter_id .. '@' .. dlq)
        local before = redis.call('HGET', P .. 'old:' .. g, member)
        if before then
          redis.call('XDEL', P .. 'letters', before)
          redis.call('HDEL', P .. 'old:' .. g, member)
        end
      else
        skip(g, member, reason)
      end
    end
    if inbox ~= '' and not again then redis.call('ZADD', P .. 'inbox:' .. g, int(NOW), inbox) end
    for _, event in ipairs(notices) do
      if not event.none then append(event, window) end
    end
    for _, event in ipairs(follow) do append(event, window) end
    redis.call('HSET', P .. 'active', g, int(NOW))
  end
  answers[i] = answer
end
keep_last()
wake()
return answers

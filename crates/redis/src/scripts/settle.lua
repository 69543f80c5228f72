-- Applies verdicts: each one whole or not at all. Arguments: window in ms, number of verdicts; for each: verdict,
-- group, its name, event, token. The verdict K is an ack without anything else, and has no more arguments. The others
-- go on with delay, failure, reason, inbox record, dead letter (stream and fields), notices and follow-ups.
local window, n = arg(), num()
local answers = {}

-- Acks without anything else. Those of one group are applied together.
local acks = {}
local function settle_acks()
  if #acks == 0 then return end
  local g, name = acks[1].g, acks[1].name
  local asked = {}
  for i, ack in ipairs(acks) do asked[i] = ack.member end
  local texts = redis.call('HMGET', P .. 'st:' .. g, unpack(asked))
  local ends = redis.call('ZMSCORE', P .. 'lease:' .. g, unpack(asked))
  local ids, okeys = {}, {}
  for i, ack in ipairs(acks) do
    local member = ack.member
    local kind, held, _, by, okey
    if texts[i] and not okeys[member] then kind, held, _, by, okey = read_state(texts[i]) end
    if kind == 'F' and held .. '|' .. by == ack.token and tonumber(ends[i] or '0') > NOW then
      okeys[member] = okey
      local id, key = of(member)
      local of_key = ids[key]
      if not of_key then
        of_key = { {}, {}, {} }
        ids[key] = of_key
      end
      local n = #of_key[1] + 1
      of_key[1][n], of_key[2][n], of_key[3][n] = id, member, ack.at
    else
      answers[ack.at] = 'lost'
    end
  end
  acks = {}
  if not next(ids) then return end
  begin(g)
  -- First XACK. If the server refuses it for a stream, none of the acks of that stream is recorded.
  local members = {}
  for key, of_key in pairs(ids) do
    local refused = ack_entries(key, name, of_key[1])
    for _, at in ipairs(of_key[3]) do answers[at] = refused and 'failed ' .. refused or 'ok' end
    if not refused then
      redis.call('ZREM', due_set(g, key), unpack(of_key[2]))
      for _, member in ipairs(of_key[2]) do members[#members + 1] = member end
    end
  end
  if #members == 0 then return end
  redis.call('HDEL', P .. 'st:' .. g, unpack(members))
  redis.call('ZREM', P .. 'lease:' .. g, unpack(members))
  redis.call('HDEL', P .. 'fail:' .. g, unpack(members))
  redis.call('HDEL', P .. 'again:' .. g, unpack(members))
  for _, member in ipairs(members) do finish_key(g, member, okeys[member]) end
  redis.call('HSET', P .. 'active', g, int(NOW))
end

local function settle_one(i, g, name, member, token, verdict, delay, failure, reason, inbox, dlq, letter, notices, follow)
  local text = redis.call('HGET', P .. 'st:' .. g, member)
  local kind, held, attempts, by, okey
  if text then kind, held, attempts, by, okey = read_state(text) end
  local answer = 'ok'
  if kind ~= 'F' or held .. '|' .. by ~= token then
    answer = 'lost'
  elseif tonumber(redis.call('ZSCORE', P .. 'lease:' .. g, member) or '0') <= NOW then
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
      -- A notice that was appended before with another text is left out: once is enough.
      for _, event in ipairs(notices) do
        if check(event, seen) then event.none = true end
      end
    end
    if answer == 'ok' and dlq ~= '' and not is_stream(dlq) then answer = 'wrongtype ' .. dlq end
  end
  -- First everything that must be there when the event ends: dead letter, skip, notice, follow-ups. If one of them
  -- is refused, nothing of the verdict stays.
  local letter_id, skip_id, failed, done
  if answer == 'ok' then
    begin(g)
    if verdict == 'D' and dlq ~= '' then
      letter_id = redis.pcall('XADD', dlq, '*', unpack(letter))
      if type(letter_id) == 'table' then failed, letter_id = letter_id.err, nil end
    elseif verdict == 'S' or verdict == 'D' then
      skip_id = skip(g, member, reason)
      if type(skip_id) == 'table' then failed, skip_id = skip_id.err, nil end
    end
    if not failed then
      local events = {}
      for _, event in ipairs(notices) do
        if not event.none then events[#events + 1] = event end
      end
      for _, event in ipairs(follow) do events[#events + 1] = event end
      failed, done = append_all(events, window)
    end
    if failed then
      if letter_id then redis.call('XDEL', dlq, letter_id) end
      if skip_id then redis.call('XDEL', P .. 'skips', skip_id) end
      answer = 'failed ' .. failed
    end
  end
  if answer == 'ok' then
    if letter_id then
      redis.call('HSET', P .. 'dead:' .. g, member, letter_id .. '@' .. dlq)
      local before = redis.call('HGET', P .. 'old:' .. g, member)
      if before then
        redis.call('XDEL', P .. 'letters', before)
        redis.call('HDEL', P .. 'old:' .. g, member)
      end
    end
    if inbox ~= '' and not again then redis.call('ZADD', P .. 'inbox:' .. g, int(NOW), inbox) end
    if verdict == 'A' or verdict == 'S' or verdict == 'D' then
      finish(g, name, member, okey)
    else
      if verdict == 'R' then
        local before = redis.call('HGET', P .. 'fail:' .. g, member)
        redis.call('HSET', P .. 'fail:' .. g, member, before and before .. ',' .. failure or failure)
      end
      wait_until(g, member, NOW + delay, verdict == 'R' and attempts or attempts - 1, okey)
      promote(g, okey)
      if delay == 0 then WAKE = true end
    end
    redis.call('HSET', P .. 'active', g, int(NOW))
  end
  answers[i] = answer
end

for i = 1, n do
  local verdict, g, name, member, token = arg(), arg(), arg(), arg(), arg()
  local plain = verdict == 'K'
  if #acks > 0 and (not plain or acks[1].g ~= g or #acks >= BULK) then settle_acks() end
  if plain then
    acks[#acks + 1] = { at = i, g = g, name = name, member = member, token = token }
  else
    local delay, failure, reason, inbox = num(), arg(), arg(), arg()
    local dlq, letter = arg(), {}
    for j = 1, num() do letter[j] = arg() end
    local notices, follow = {}, {}
    for j = 1, num() do notices[j] = read_event() end
    for j = 1, num() do follow[j] = read_event() end
    settle_one(i, g, name, member, token, verdict, delay, failure, reason, inbox, dlq, letter, notices, follow)
  end
end
settle_acks()
keep_last()
wake()
return answers

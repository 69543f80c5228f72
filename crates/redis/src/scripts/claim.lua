-- Hands out events of a group. Arguments: group, its name on the server, revision of its record, version of
-- the registry, tag of this claim, tags of claims whose answers were lost, number wanted, lease in ms, time as
-- text, order of new events (ordered by key, merged by time, or empty), streams whose waiting events may be handed
-- out, streams whose new events may be handed out.
local g, name, revision, registry = arg(), arg(), arg(), arg()
local tag, undo = arg(), {}
for _ = 1, num() do undo[arg()] = true end
local want, lease, stamp = num(), num(), arg()
local order = arg()
local may, new = {}, {}
for i = 1, num() do may[i] = arg() end
local streams = num()
for i = 1, streams do new[i] = arg() end

local record = redis.call('HGET', P .. 'groups', g)
if not record then return { 'gone' } end
if string.match(record, '^(%S+)\n') ~= revision then return { 'changed' } end
if (redis.call('GET', P .. 'registry') or '0') ~= registry then return { 'changed' } end

begin(g)
local ST, LEASE, FAIL = P .. 'st:' .. g, P .. 'lease:' .. g, P .. 'fail:' .. g
local until_ = int(NOW + lease)

-- The state of a member of a sorted set. A member without one is removed.
local function state_of(member, set)
  local text = redis.call('HGET', ST, member)
  if text then return read_state(text) end
  redis.call('ZREM', set, member)
end

-- An event in an answer that was lost had no attempt: it waits again.
if next(undo) then
  for _, member in ipairs(redis.call('ZRANGE', LEASE, 0, -1)) do
    local _, _, attempts, by, okey = state_of(member, LEASE)
    if by and undo[by] then
      wait_until(g, member, NOW, attempts - 1, okey)
      promote(g, okey)
    end
  end
end

-- Whether a dead process had only one event in flight, over all groups.
local alone = {}
local function was_alone(by)
  local owner = string.match(by, '^[^.]*')
  if alone[owner] == nil then
    alone[owner] = false
    if redis.call('EXISTS', P .. 'owner:' .. owner) == 0 then
      local count = 0
      for _, other in ipairs(redis.call('HKEYS', P .. 'groups')) do
        for _, member in ipairs(redis.call('ZRANGE', P .. 'lease:' .. other, 0, 1000)) do
          local text = redis.call('HGET', P .. 'st:' .. other, member)
          if text then
            local _, _, _, theirs = read_state(text)
            if string.match(theirs, '^[^.]*') == owner then count = count + 1 end
          end
        end
      end
      -- The leases of a process may end one after another: this notes that the last one was not alone.
      local key = P .. 'notalone:' .. owner
      if count > 1 then redis.call('SET', key, '1', 'PX', 86400000) end
      alone[owner] = count == 1 and redis.call('EXISTS', key) == 0
    end
  end
  return alone[owner]
end

local ended = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', LEASE, '-inf', int(NOW), 'LIMIT', 0, 256)) do
  local _, _, attempts, by, okey = state_of(member, LEASE)
  if by then ended[#ended + 1] = { member, attempts, okey, was_alone(by) } end
end
for _, one in ipairs(ended) do
  local member, attempts, okey = one[1], one[2], one[3]
  local crash = '{"attempt":' .. int(attempts) .. ',"at":"' .. stamp
    .. '","kind":"crash","error":"the lease ended before the event was settled"'
    .. (one[4] and ',"alone":true' or '') .. '}'
  local before = redis.call('HGET', FAIL, member)
  redis.call('HSET', FAIL, member, before and before .. ',' .. crash or crash)
  wait_until(g, member, NOW, attempts, okey)
  promote(g, okey)
end

local out, lost, errors = {}, {}, {}
local token = nil
-- The answer is also bounded in bytes: a very large answer takes longer than the client waits.
local MOST_BYTES = 8388608
local bytes = 0
local function has_room() return #out < want and bytes < MOST_BYTES end

-- Events that were handed out and are not recorded yet: one command for many events is quicker than one for each.
local members, states, leases, dues = {}, {}, {}, {}
local function record_all()
  if #members == 0 then return end
  redis.call('HSET', ST, unpack(states))
  redis.call('ZADD', LEASE, unpack(leases))
  for key, waiting in pairs(dues) do redis.call('ZREM', due_set(g, key), unpack(waiting)) end
  local failures = redis.call('HMGET', FAIL, unpack(members))
  local again = redis.call('HMGET', P .. 'again:' .. g, unpack(members))
  local before = #out - #members
  for i = 1, #members do
    out[before + i][5] = failures[i] or ''
    out[before + i][7] = again[i] or '0'
  end
  members, states, leases, dues = {}, {}, {}, {}
end

local function hand_out(member, key, id, attempts, okey, fields)
  for _, field in ipairs(fields) do bytes = bytes + #field end
  token = token or tonumber(redis.call('INCRBY', P .. 'token', want)) - want
  token = token + 1
  local proof = int(token)
  local n = #members + 1
  members[n] = member
  states[2 * n - 1], states[2 * n] = member, state('F', proof, attempts, tag, okey)
  leases[2 * n - 1], leases[2 * n] = until_, member
  local waiting = dues[key]
  if not waiting then
    waiting = {}
    dues[key] = waiting
  end
  waiting[#waiting + 1] = member
  out[#out + 1] = { key, id, proof, int(attempts), '', fields, '0' }
  -- Later events of its key look at its state.
  if okey ~= '' or n >= BULK then record_all() end
end

-- Whether an event of a key must wait: an earlier one is unfinished, or a later one is being handled.
local function must_wait(member, okey)
  if okey == '' then return false end
  for i, other in ipairs(redis.call('ZRANGE', key_set(g, okey), 0, 200)) do
    local ms, seq, rest = string.match(other, '^0*(%d+)%-0*(%d+)@(.*)$')
    local theirs = ms .. '-' .. seq .. '@' .. rest
    if i == 1 and theirs ~= member then return true end
    local text = theirs ~= member and redis.call('HGET', ST, theirs)
    if text and string.sub(text, 1, 1) == 'F' then return true end
  end
  return false
end

-- Events that wait and are due. Each turn takes one event out of its set.
for _, key in ipairs(may) do
  local DUE = due_set(g, key)
  local turns = 0
  while has_room() and turns < 1000 do
    local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', int(NOW), 'LIMIT', 0, want - #out)
    if #due == 0 then break end
    for _, member in ipairs(due) do
      if not has_room() then break end
      turns = turns + 1
      local id = of(member)
      local kind, _, attempts, _, okey = state_of(member, DUE)
      local found = redis.pcall('XRANGE', key, id, id)
      local entry = not found.err and found[1]
      if not kind then
        -- The event has no state any more.
      elseif found.err then
        -- An error does not show that the event is gone: it is tried again in a second.
        errors[#errors + 1] = key .. ': ' .. found.err
        redis.call('ZADD', DUE, int(NOW + 1000), member)
      elseif must_wait(member, okey) then
        -- The end of the event that it waits for makes it due again.
        redis.call('HSET', ST, member, state('P', '0', attempts, '', okey))
        redis.call('ZREM', DUE, member)
      elseif entry then
        hand_out(member, key, id, attempts + 1, okey, entry[2])
      else
        -- The event was deleted from its stream although the group had yet to finish it.
        finish(g, name, member, okey)
        redis.call('HINCRBY', P .. 'lost', g, 1)
        lost[#lost + 1] = member
      end
    end
    record_all()
  end
end

local function read(key, count)
  local answer = redis.pcall('XREADGROUP', 'GROUP', name, 'everbus', 'COUNT', count, 'STREAMS', key, '>')
  if type(answer) == 'table' and answer.err then
    if string.find(answer.err, 'NOGROUP', 1, true) then
      -- The stream was removed: all entries that it has now are new.
      answer = join_stream(g, key, name, '0-0', true)
      if not (type(answer) == 'table' and answer.err) then
        answer = redis.pcall('XREADGROUP', 'GROUP', name, 'everbus', 'COUNT', count, 'STREAMS', key, '>')
      end
    end
    if type(answer) == 'table' and answer.err then
      errors[#errors + 1] = key .. ': ' .. answer.err
      return {}
    end
  end
  if not answer then return {} end
  count_read(g, key, #answer[1][2])
  return answer[1][2]
end

-- The first new event of each stream: its id as a text that sorts (peeked), and its id (heads).
local peeked, heads = {}, {}
local function peek(i, after)
  peeked[i] = nil
  local found = redis.pcall('XRANGE', new[i], '(' .. after, '+', 'COUNT', 1)
  if found.err then
    errors[#errors + 1] = new[i] .. ': ' .. found.err
  elseif found[1] then
    peeked[i], heads[i] = pad(found[1][1]), found[1][1]
  end
end

local function peek_all()
  for i = 1, streams do
    local groups = redis.pcall('XINFO', 'GROUPS', new[i])
    local after = '0-0'
    for _, group in ipairs(groups.err and {} or groups) do
      local info = pairs_of(group)
      if info['name'] == name then after = info['last-delivered-id'] end
    end
    if not groups.err then peek(i, after) end
  end
end

-- The streams with the two oldest new events.
local function oldest()
  local first, second = nil, nil
  for i = 1, streams do
    if peeked[i] and (not first or peeked[i] < peeked[first]) then
      first, second = i, first
    elseif peeked[i] and (not second or peeked[i] < peeked[second]) then
      second = i
    end
  end
  return first, second
end

-- Takes new events stream by stream.
local function take_plain()
  for i = 1, streams do
    -- A few first: their size shows how many more fit into the answer.
    local step = 8
    while has_room() do
      local count = math.min(step, want - #out)
      local page = read(new[i], count)
      for _, entry in ipairs(page) do
        hand_out(entry[1] .. '@' .. new[i], new[i], entry[1], 1, '', entry[2])
      end
      if #page < count then break end
      step = math.max(1, math.floor((MOST_BYTES - bytes) / (bytes / #out + 1)))
    end
  end
end

-- Takes new events in the order of their ids over all streams: from the stream with the oldest event, those that come
-- before the first event of the next stream.
local function take_merged()
  peek_all()
  while has_room() do
    local first, second = oldest()
    if not first then break end
    local count = math.min(want - #out, 16)
    if second then
      count = #redis.call('XRANGE', new[first], heads[first], heads[second], 'COUNT', count)
    end
    local page = read(new[first], count)
    for _, entry in ipairs(page) do
      hand_out(entry[1] .. '@' .. new[first], new[first], entry[1], 1, '', entry[2])
    end
    if #page == 0 then
      peeked[first] = nil
    else
      peek(first, page[#page][1])
    end
  end
end

-- Takes new events in the order of their ids over all streams, since a key may have events in several streams. Of each
-- key only the first event is handed out. Returns whether there were more events than it could examine.
local function take_ordered()
  peek_all()
  local reads = 0
  while has_room() do
    if reads >= 4 * want + 64 then return true end
    local first = oldest()
    if not first then return false end
    local key = new[first]
    local entry = read(key, 1)[1]
    if not entry then
      peeked[first] = nil
    else
      reads = reads + 1
      local id, okey = entry[1], field_of(entry[2], 'k') or ''
      local member = id .. '@' .. key
      if okey == '' then
        hand_out(member, key, id, 1, '', entry[2])
      else
        local set = key_set(g, okey)
        redis.call('ZADD', set, 0, pad(id) .. '@' .. key)
        if redis.call('ZCARD', set) == 1 then
          hand_out(member, key, id, 1, okey, entry[2])
        else
          redis.call('HSET', ST, member, state('P', '0', 0, '', okey))
        end
      end
      peek(first, id)
    end
  end
  return false
end

local more = false
if order == 'ordered' then
  more = take_ordered()
elseif order == 'merged' and streams > 1 then
  take_merged()
else
  take_plain()
end

record_all()
if #out > 0 then redis.call('HSET', P .. 'active', g, int(NOW)) end
wake()
local soon = nil
local function sooner(set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2]
  -- A time in the past is that of an event that this claim left out.
  if first and (not soon or tonumber(first) < soon) then soon = math.max(tonumber(first), NOW) end
end
sooner(LEASE)
for _, key in ipairs(may) do sooner(due_set(g, key)) end
local wait = (more or not has_room()) and 0 or soon and soon - NOW or -1
return { 'ok', out, lost, errors, int(wait) }

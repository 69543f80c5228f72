-- Hands out new and waiting events that no process has handled for too long. Arguments: group, its name, tag of this
-- claim, time without a handler in ms, lease in ms, number of streams without a handler, those streams.
local g, name, tag, after, lease = arg(), arg(), arg(), num(), num()
local ORPHANS = P .. 'orphans:' .. g
local out, wanted = {}, {}
for _ = 1, num() do
  local key = arg()
  wanted[key] = true
  local last = nil
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  for _, group in ipairs(groups.err and {} or groups) do
    local info = pairs_of(group)
    if info['name'] == name then last = info['last-delivered-id'] end
  end
  if not last and not groups.err then
    join_stream(g, key, name, '0-0')
    last = '0-0'
  end
  -- Events that were handed out before and wait, for example because their process died.
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', due_set(g, key), '-inf', int(NOW - after), 'LIMIT', 0, 20)) do
    local id = of(member)
    local text = redis.call('HGET', P .. 'st:' .. g, member)
    local entry = redis.call('XRANGE', key, id, id)[1]
    if text and entry then
      local _, _, attempts, _, okey = read_state(text)
      local token = int(redis.call('INCR', P .. 'token'))
      redis.call('HSET', P .. 'st:' .. g, member, state('F', token, attempts, tag, okey))
      redis.call('ZREM', due_set(g, key), member)
      redis.call('ZADD', P .. 'lease:' .. g, int(NOW + lease), member)
      local failures = redis.call('HGET', P .. 'fail:' .. g, member) or ''
      local again = redis.call('HGET', P .. 'again:' .. g, member) or '0'
      out[#out + 1] = { key, id, token, int(attempts), failures, entry[2], again }
    end
  end
  local function first()
    local entry = last and redis.call('XRANGE', key, '(' .. last, '+', 'COUNT', 1)[1]
    return entry and entry[1]
  end
  local id = first()
  local since = NOW
  local known = redis.call('HGET', ORPHANS, key)
  -- If the group has read on since the last check, some process handles the type, and the time begins again.
  if known and id then
    local of_id, at_ms = string.match(known, '^(%S+) (%d+)$')
    if of_id == id then since = tonumber(at_ms) end
  end
  while id and #out < 20 do
    local ms = tonumber((split_id(id)))
    if NOW - math.max(since, ms) < after then break end
    local answer = redis.call('XREADGROUP', 'GROUP', name, 'everbus', 'COUNT', 1, 'STREAMS', key, '>')
    local entry = answer and answer[1][2][1]
    if not entry then break end
    count_read(g, key, 1)
    local member = entry[1] .. '@' .. key
    local token = redis.call('INCR', P .. 'token')
    redis.call('HSET', P .. 'st:' .. g, member, state('F', int(token), 0, tag, ''))
    redis.call('ZADD', P .. 'lease:' .. g, int(NOW + lease), member)
    out[#out + 1] = { key, entry[1], int(token), '0', '', entry[2], '0' }
    last = entry[1]
    id = first()
  end
  if id then
    redis.call('HSET', ORPHANS, key, id .. ' ' .. int(since))
  else
    redis.call('HDEL', ORPHANS, key)
  end
end
for _, key in ipairs(redis.call('HKEYS', ORPHANS)) do
  if not wanted[key] then redis.call('HDEL', ORPHANS, key) end
end
return out

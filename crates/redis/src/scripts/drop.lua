-- Skips the oldest waiting events of a group, until at most `keep` unfinished events are left. Arguments: group, its
-- name, reason, number to keep, streams.
local g, name, reason, keep = arg(), arg(), arg(), num()
local wanted, keys = {}, {}
for i = 1, num() do
  keys[i] = arg()
  wanted[keys[i]] = true
end
local waiting, flying = {}, 0
for member, text in pairs(pairs_of(redis.call('HGETALL', P .. 'st:' .. g))) do
  local id, key = of(member)
  if wanted[key] then
    local kind, _, _, _, okey = read_state(text)
    local lease = kind == 'F' and redis.call('ZSCORE', P .. 'lease:' .. g, member)
    if lease and tonumber(lease) > NOW then
      flying = flying + 1
    else
      waiting[#waiting + 1] = { pad(id), member, okey }
    end
  end
end
table.sort(waiting, function(a, b) return a[1] < b[1] end)
local unread, next = 0, {}
for _, key in ipairs(keys) do
  -- The group may not read this stream yet.
  join_stream(g, key, name, '0-0')
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  if not groups.err then
    for _, group in ipairs(groups) do
      local info = pairs_of(group)
      if info['name'] == name then
        local from = info['last-delivered-id']
        unread = unread + unread_of(g, key, info) - unread_of_others(key, from, g)
        local first = redis.call('XRANGE', key, '(' .. from, '+', 'COUNT', 1)[1]
        if first then next[key] = pad(first[1]) end
      end
    end
  end
end
-- A step of this size does not block the server for long; the caller asks again.
local over = math.min(#waiting + flying + unread - keep, 500)
local dropped = {}
for _, one in ipairs(waiting) do
  if over <= 0 then break end
  finish(g, name, one[2], one[3])
  skip(g, one[2], reason)
  dropped[#dropped + 1] = one[2]
  over = over - 1
end
while over > 0 do
  local first = nil
  for key, id in pairs(next) do
    if not first or id < next[first] then first = key end
  end
  if not first then break end
  local answer = redis.call('XREADGROUP', 'GROUP', name, 'everbus', 'COUNT', 1, 'STREAMS', first, '>')
  local entry = answer and answer[1][2][1]
  if not entry then
    next[first] = nil
  else
    count_read(g, first, 1)
    redis.call('XACK', first, name, entry[1])
    local member = entry[1] .. '@' .. first
    local group = field_of(entry[2], 'to')
    if not group or group == g then
      skip(g, member, reason)
      dropped[#dropped + 1] = member
      over = over - 1
    end
    local following = redis.call('XRANGE', first, '(' .. entry[1], '+', 'COUNT', 1)[1]
    next[first] = following and pad(following[1]) or nil
  end
end
wake()
return dropped

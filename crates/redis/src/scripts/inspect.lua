-- The progress of a group. Arguments: group, its name, number of streams that it wants, those streams.
-- Answers: in flight, waiting, dead letters, lost, active at; then for each stream: name, last delivered id, unread,
-- in flight, waiting, oldest id that is not finished (or empty), dead letters.
local g, name = arg(), arg()
local wants = {}
for _ = 1, num() do wants[arg()] = true end
local dead = 0
local dead_by_key = {}
for member, letter in pairs(pairs_of(redis.call('HGETALL', P .. 'dead:' .. g))) do
  local id, key = of(letter)
  local there = redis.pcall('XRANGE', key, id, id)
  -- A letter that another program deleted from the stream does not count. A letter that this user may not read does.
  if there.err or #there > 0 then
    dead = dead + 1
    local _, stream = of(member)
    dead_by_key[stream] = (dead_by_key[stream] or 0) + 1
  end
end
-- An event whose lease has ended counts as waiting.
local flying = redis.call('ZCOUNT', P .. 'lease:' .. g, '(' .. int(NOW), '+inf')
local known = redis.call('HLEN', P .. 'st:' .. g)
local by_key = {}
local function count(key, what)
  by_key[key] = by_key[key] or { 0, 0 }
  by_key[key][what] = by_key[key][what] + 1
end
for _, member in ipairs(redis.call('HKEYS', P .. 'st:' .. g)) do
  local _, key = of(member)
  local lease = redis.call('ZSCORE', P .. 'lease:' .. g, member)
  count(key, lease and tonumber(lease) > NOW and 1 or 2)
end
local streams = {}
for _, key in ipairs(redis.call('HKEYS', P .. 'streams')) do
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  if not groups.err then
    local mine = nil
    for _, group in ipairs(groups) do
      local info = pairs_of(group)
      if info['name'] == name then mine = info end
    end
    local after, unread, oldest = '0-0', 0, ''
    if mine then after = mine['last-delivered-id'] end
    if wants[key] then
      if not mine then
        unread = redis.call('XLEN', key)
      else
        unread = unread_of(g, key, mine)
      end
      unread = math.max(unread - unread_of_others(key, after, g), 0)
      if unread > 0 then
        local entry = redis.call('XRANGE', key, '(' .. after, '+', 'COUNT', 1)[1]
        if entry then oldest = entry[1] end
      end
    end
    if mine and mine['pending'] > 0 then
      local first = redis.call('XPENDING', key, name)[2]
      if first then oldest = first end
    end
    local counts = by_key[key] or { 0, 0 }
    if mine or wants[key] then
      streams[#streams + 1] = { key, after, tostring(unread), tostring(counts[1]), tostring(counts[2]), oldest,
        tostring(dead_by_key[key] or 0) }
    end
  end
end
return { tostring(flying), tostring(known - flying), tostring(dead),
  redis.call('HGET', P .. 'lost', g) or '0', redis.call('HGET', P .. 'active', g) or '0', streams }

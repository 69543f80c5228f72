-- Counts events that other programs removed from a stream before groups had read them. Arguments: stream, number of
-- groups; for each: group, its name. Answers for each group: how many events it missed since the last count.
local key, groups, counts = arg(), {}, {}
for i = 1, num() do
  groups[i] = { arg(), arg() }
  counts[i] = '0'
end
local total, info = total_of(key)
if not info['length'] then return counts end
local there = {}
for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local one = pairs_of(group)
  there[one['name']] = one
end
for i, group in ipairs(groups) do
  local g, name = group[1], group[2]
  local mine, READ = there[name], P .. 'read:' .. g
  local read = tonumber(redis.call('HGET', READ, key) or '')
  if mine and mine['consumers'] > 1 then
    -- Another program reads for the group too, and does not update our count.
    if read then redis.call('HDEL', READ, key) end
  elseif mine then
    -- The number of unread entries is known only if the group has read to the end of the stream, or none of its
    -- entries.
    local last, left = mine['last-delivered-id'], nil
    if pad(last) >= pad(info['last-generated-id']) then
      left = 0
    elseif info['length'] == 0 or pad(info['recorded-first-entry-id']) > pad(last) then
      left = info['length']
    end
    if left and read ~= total - left then
      redis.call('HSET', READ, key, int(total - left))
      local missed = read and total - left - read or 0
      if missed > 0 then
        redis.call('HINCRBY', P .. 'lost', g, int(missed))
        counts[i] = int(missed)
      end
    end
  end
end
return counts

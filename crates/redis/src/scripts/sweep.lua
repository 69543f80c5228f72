-- Takes over events that another program read for the group and did not finish: they are pending, and have no state of
-- ours. Arguments: group, its name, stream, shortest idle time in ms, first id, count, whether the group is ordered.
-- Answers: how many events were taken over, and the next first id (empty at the end).
local g, name, key, idle, from, count, ordered = arg(), arg(), arg(), arg(), arg(), num(), arg() == '1'
local page = redis.pcall('XPENDING', key, name, 'IDLE', idle, from, '+', count)
if page.err then return { '0', '' } end
local taken, last = 0, ''
for _, one in ipairs(page) do
  local id, times = one[1], one[4]
  local member = id .. '@' .. key
  last = id
  if redis.call('HEXISTS', P .. 'st:' .. g, member) == 0 then
    redis.call('XCLAIM', key, name, 'everbus', 0, id, 'JUSTID')
    local entry = ordered and redis.call('XRANGE', key, id, id)[1]
    local okey = entry and field_of(entry[2], 'k') or ''
    if okey ~= '' then redis.call('ZADD', key_set(g, okey), 0, pad(id) .. '@' .. key) end
    wait_until(g, member, NOW, times, okey)
    taken = taken + 1
  end
end
if taken > 0 then WAKE = true end
wake()
return { tostring(taken), #page < count and '' or '(' .. last }

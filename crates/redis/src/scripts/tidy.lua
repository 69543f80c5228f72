-- Removes retried dead letters after a time, one step of it. Arguments: group, how long they are kept in ms, cursor,
-- count. Answers: the next cursor.
local g, kept, cursor, count = arg(), num(), arg(), arg()
local oldest = pad(int(NOW - kept) .. '-0')
redis.call('XTRIM', P .. 'letters', 'MINID', '~', int(NOW - kept))
local page = redis.call('HSCAN', P .. 'old:' .. g, cursor, 'COUNT', count)
for i = 1, #page[2], 2 do
  if pad(page[2][i + 1]) < oldest then redis.call('HDEL', P .. 'old:' .. g, page[2][i]) end
end
-- Also removes records of letters that another program deleted from their streams.
if cursor == '0' then
  for member, letter in pairs(pairs_of(redis.call('HRANDFIELD', P .. 'dead:' .. g, count, 'WITHVALUES'))) do
    local id, key = of(letter)
    local there = redis.pcall('XRANGE', key, id, id)
    if not there.err and #there == 0 then redis.call('HDEL', P .. 'dead:' .. g, member) end
  end
end
return page[1]

-- A page of the dead letters of a group. Arguments: group, which (dead: open ones, old: the others), cursor, count, and
-- an event (or empty): then only its letter is read. Answers: next cursor, then event and fields of each letter.
local g, which, cursor, count, only = arg(), arg(), arg(), arg(), arg()
local name = P .. which .. ':' .. g
local next, flat = '0', {}
if only ~= '' then
  local letter = redis.call('HGET', name, only)
  if letter then flat = { only, letter } end
else
  local page = redis.call('HSCAN', name, cursor, 'COUNT', count)
  next, flat = page[1], page[2]
end
local found = {}
for i = 1, #flat, 2 do
  local id, key = flat[i + 1], P .. 'letters'
  if which == 'dead' then id, key = of(flat[i + 1]) end
  local entry = redis.pcall('XRANGE', key, id, id)
  if entry.err then return entry end
  if entry[1] then found[#found + 1] = { flat[i], entry[1][2] } end
end
return { next, found }

-- Stores the record of a group in place of the revision that was read, and lets the group begin to read streams.
-- Arguments: group, its name, revision, record, version of the registry, number of streams; for each: stream, dialect,
-- start. A group that already reads a stream keeps its place: it may owe events that it has not read there.
local g, name, revision, record, registry = arg(), arg(), arg(), arg(), arg()
local n = num()
local joins = {}
for i = 1, n do joins[i] = { arg(), arg(), arg() } end
local kept = redis.call('HGET', P .. 'groups', g)
local there = kept and string.match(kept, '^(%S+)\n') or '0'
if there ~= revision then return 'again' end
if (redis.call('GET', P .. 'registry') or '0') ~= registry then return 'again' end
for i = 1, n do
  if not is_stream(joins[i][1]) then return 'wrongtype ' .. joins[i][1] end
end
for i = 1, n do
  local key, dialect, start = unpack(joins[i])
  local answer = join_stream(g, key, name, start, true)
  if type(answer) == 'table' and answer.err then
    if not string.find(answer.err, 'BUSYGROUP', 1, true) then return answer end
  end
  register(key, dialect)
end
local new = revision
if kept ~= revision .. '\n' .. record then
  new = nonce()
  redis.call('HSET', P .. 'groups', g, new .. '\n' .. record)
  WAKE = true
end
wake()
return 'ok ' .. new .. ' ' .. (redis.call('GET', P .. 'registry') or '0')

-- Retries a dead letter whose event is not in its stream any more: the copy of the event in the letter is appended, for
-- this group only. Arguments: group, its name, whether it is ordered, whether it wants the type, dead event, time as
-- text, number of fields, fields of the event. Answers: ok, none (the letter is not open), or failed and the error.
local g, name, ordered, wants = arg(), arg(), arg() == '1', arg() == '1'
local member, stamp = arg(), arg()
local fields = {}
for i = 1, num() do fields[i] = arg() end
local letter = redis.call('HGET', P .. 'dead:' .. g, member)
if not letter then return { 'none' } end
local _, key = of(member)
local id = add(key, fields)
if type(id) == 'table' then return { 'failed', id.err } end
local new = id .. '@' .. key
redis.call('ZADD', P .. 'addressed:' .. key, 0, pad(id) .. '@' .. g)
redis.call('HSET', P .. 'again:' .. g, new, '1')
close_letter(g, member, letter, stamp, '')
-- If the event dies again, its new letter continues this one.
local kept = redis.call('HGET', P .. 'old:' .. g, member)
if kept then
  redis.call('HSET', P .. 'old:' .. g, new, kept)
  redis.call('HDEL', P .. 'old:' .. g, member)
end
if not wants then revive(g, name, new, ordered, fields) end
WAKE = true
keep_last()
wake()
return { 'ok' }

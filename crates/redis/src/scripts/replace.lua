-- Replaces a dead letter by a corrected event. Arguments: group, its name, whether it is ordered, whether it wants the
-- type, dead event, time as text, id of the new event, window in ms, the new event.
local g, name, ordered, wants = arg(), arg(), arg() == '1', arg() == '1'
local member, stamp, by, window = arg(), arg(), arg(), arg()
local event = read_event()
local letter = redis.call('HGET', P .. 'dead:' .. g, member)
if not letter then return { 'none' } end
local refused = check(event, {})
if refused then return { refused[1], refused[2] } end
if event.known then return { 'reused', event.id } end
local appended = append(event, window)
if appended.err then return { 'failed', appended.err } end
close_letter(g, member, letter, stamp, by)
if not wants then revive(g, name, event.at .. '@' .. event.key, ordered, event.fields) end
keep_last()
wake()
return { 'ok', event.at, event.key }

-- Redelivers events to a group. Arguments: group, its name, whether it is ordered, what (letter: retry open
-- dead letters, event: deliver any event, ask: change nothing), time as text, number of events, events, each with
-- whether the group wants it. Answers for each: queued, owed, gone (not in the stream any more), or none (no open dead
-- letter).
local g, name, ordered, what, stamp = arg(), arg(), arg() == '1', arg(), arg()
local answers = {}
local after = {}
for i = 1, num() do
  local member, wants = arg(), arg() == '1'
  local id, key = of(member)
  local letter = redis.call('HGET', P .. 'dead:' .. g, member)
  local found = redis.pcall('XRANGE', key, id, id)
  if found.err then
    wake()
    return found
  end
  local entry = found[1]
  local answer = 'queued'
  if what == 'letter' and not letter then
    answer = 'none'
  elseif not entry then
    answer = 'gone'
  elseif what ~= 'letter' then
    if after[key] == nil then
      after[key] = false
      local groups = redis.pcall('XINFO', 'GROUPS', key)
      for _, group in ipairs(groups.err and {} or groups) do
        local info = pairs_of(group)
        if info['name'] == name then after[key] = pad(info['last-delivered-id']) end
      end
    end
    -- A group owes the events that it wants after its position, or all of them if it has no position in the stream.
    local beyond = wants and (not after[key] or pad(id) > after[key])
    if letter or beyond or redis.call('HEXISTS', P .. 'st:' .. g, member) == 1 then answer = 'owed' end
  end
  if answer == 'queued' and what ~= 'ask' then
    if letter then close_letter(g, member, letter, stamp, '') end
    revive(g, name, member, ordered, entry[2])
  end
  answers[i] = answer
end
wake()
return answers

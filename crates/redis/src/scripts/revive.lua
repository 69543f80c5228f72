-- Delivers events to a group once more. Arguments: group, its name, whether it is ordered, what (letter: open dead
-- letters, event: any event, ask: nothing happens), time as text, events, each
-- with whether the group wants it. Answers for each: queued, owed, gone (the stream has it no more) or none.
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
    -- Beyond its position a group owes what it wants; a stream that it does not want has no position.
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

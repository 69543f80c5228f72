-- Removes open dead letters, and their events if no other group needs them. Arguments: group, reason of a skip, 1 if
-- the events stay in any case, number, events, each with the groups that want it. Answers for each: 1 if the event was
-- removed too, 0 if it was not, empty if the letter is not open.
local g, reason, keep = arg(), arg(), arg() == '1'
local answers = {}
for i = 1, num() do
  local member = arg()
  -- The groups that want the event. A group that does not read the stream yet needs the event.
  local must, there = {}, {}
  for j = 1, num() do must[j] = arg() end
  local id, key = of(member)
  local letter = redis.call('HGET', P .. 'dead:' .. g, member)
  answers[i] = ''
  if letter then
    local letter_id, dlq = of(letter)
    redis.call('XDEL', dlq, letter_id)
    redis.call('HDEL', P .. 'dead:' .. g, member)
    local needed = keep
    for _, other in ipairs(redis.call('HKEYS', P .. 'groups')) do
      if redis.call('HEXISTS', P .. 'dead:' .. other, member) == 1 then needed = true end
    end
    local groups = redis.pcall('XINFO', 'GROUPS', key)
    for _, group in ipairs(groups.err and {} or groups) do
      local info = pairs_of(group)
      there[info['name']] = true
      if pad(info['last-delivered-id']) < pad(id) then needed = true end
      if #redis.call('XPENDING', key, info['name'], id, id, 1) > 0 then needed = true end
    end
    for _, name in ipairs(must) do
      if not there[name] then needed = true end
    end
    if needed then
      skip(g, member, reason)
      answers[i] = '0'
    else
      redis.pcall('XDEL', key, id)
      answers[i] = '1'
    end
  end
end
return answers

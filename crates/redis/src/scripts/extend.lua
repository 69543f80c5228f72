-- Extends leases. Arguments: length in ms, number, then group, event and token of each.
local by, n = num(), num()
local answers = {}
for i = 1, n do
  local g, member, token = arg(), arg(), arg()
  local text = redis.call('HGET', P .. 'st:' .. g, member)
  local kind, held
  if text then kind, held = read_state(text) end
  answers[i] = '0'
  if kind == 'F' and held == token
      and tonumber(redis.call('ZSCORE', P .. 'lease:' .. g, member)) > NOW then
    redis.call('ZADD', P .. 'lease:' .. g, int(NOW + by), member)
    answers[i] = '1'
  end
end
return answers

-- Extends leases. Arguments: length in ms, number, then group, event and token of each.
local length, n = num(), num()
local answers = {}
for i = 1, n do
  local g, member, token = arg(), arg(), arg()
  local text = redis.call('HGET', P .. 'st:' .. g, member)
  local kind, held, by, _
  if text then kind, held, _, by = read_state(text) end
  begin(g)
  answers[i] = '0'
  if kind == 'F' and held .. '|' .. by == token
      and tonumber(redis.call('ZSCORE', P .. 'lease:' .. g, member) or '0') > NOW then
    redis.call('ZADD', P .. 'lease:' .. g, int(NOW + length), member)
    answers[i] = '1'
  end
end
return answers

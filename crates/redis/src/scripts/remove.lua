-- Removes a group. Arguments: group, its name, revision of its record (empty: any).
local g, name, revision = arg(), arg(), arg()
local kept = redis.call('HGET', P .. 'groups', g)
if not kept then return '0' end
if revision ~= '' and string.match(kept, '^(%S+)\n') ~= revision then return '0' end
redis.call('HDEL', P .. 'groups', g)
redis.call('HDEL', P .. 'active', g)
redis.call('HDEL', P .. 'lost', g)
for _, key in ipairs(redis.call('HKEYS', P .. 'streams')) do
  redis.pcall('XGROUP', 'DESTROY', key, name)
  redis.call('DEL', due_set(g, key))
end
for _, text in ipairs(redis.call('HVALS', P .. 'st:' .. g)) do
  local _, _, _, _, okey = read_state(text)
  if okey ~= '' then redis.call('DEL', key_set(g, okey)) end
end
for _, letter in ipairs(redis.call('HVALS', P .. 'dead:' .. g)) do
  local id, key = of(letter)
  redis.pcall('XDEL', key, id)
end
for _, letter in ipairs(redis.call('HVALS', P .. 'old:' .. g)) do
  redis.pcall('XDEL', P .. 'letters', letter)
end
for _, part in ipairs({ 'st:', 'lease:', 'fail:', 'inbox:', 'dead:', 'old:', 'again:', 'orphans:', 'handlers:', 'read:' }) do
  redis.call('DEL', P .. part .. g)
end
WAKE = true
wake()
return '1'

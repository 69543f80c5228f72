-- The last id of each stream, in the order of the arguments, then the version of the registry.
local ids = {}
for i, key in ipairs(ARGV) do
  local info = redis.pcall('XINFO', 'STREAM', key)
  ids[i] = info.err and '0-0' or pairs_of(info)['last-generated-id']
end
ids[#ARGV + 1] = redis.call('GET', P .. 'registry') or '0'
return ids

-- The last id of each stream, in the order of the arguments.
local ids = {}
for i, key in ipairs(ARGV) do
  local info = redis.pcall('XINFO', 'STREAM', key)
  ids[i] = info.err and '0-0' or pairs_of(info)['last-generated-id']
end
return ids

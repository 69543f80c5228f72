-- Sets the dialects of streams. Arguments: number of streams, then stream and dialect of each.
for _ = 1, num() do
  local key = arg()
  redis.call('HSET', P .. 'streams', key, arg())
end
redis.call('SET', P .. 'registry', nonce())
WAKE = true
wake()
return 'ok'

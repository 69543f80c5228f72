-- Deletes a value. Arguments: bucket, key, expected revision (or empty).
local bucket, key, expected = arg(), arg(), arg()
local name = P .. 'kv:' .. bucket .. ':' .. key
local known = redis.call('HGET', name, 'r')
if expected ~= '' and (known or '0') ~= expected then return { 'no', known or '' } end
redis.call('DEL', name)
redis.call('HDEL', P .. 'kv:' .. bucket, key)
redis.call('ZREM', P .. 'kv-ends', #bucket .. ':' .. bucket .. key)
redis.call('INCR', P .. 'kv-revision')
return { 'ok', known and '1' or '0' }

-- Puts a value. Arguments: bucket, key, value, expected revision (or empty), end of its life in ms from now (or 0).
local bucket, key, value, expected, ttl = arg(), arg(), arg(), arg(), num()
local name = P .. 'kv:' .. bucket .. ':' .. key
local known = redis.call('HGET', name, 'r')
if expected ~= '' and (known or '0') ~= expected then return { 'no', known or '' } end
local revision = redis.call('INCR', P .. 'kv-revision')
revision = int(revision)
redis.call('DEL', name)
redis.call('HSET', name, 'r', revision, 'v', value)
if ttl > 0 then redis.call('PEXPIRE', name, int(ttl)) end
redis.call('HSET', P .. 'kv:' .. bucket, key, revision)
return { 'ok', revision }

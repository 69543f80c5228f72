-- Puts a value. Arguments: bucket, key, value, expected revision (or empty), time until it expires in ms (or 0).
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
-- The server removes an expired value; a later put removes its name from the bucket.
local ends = P .. 'kv-ends'
if ttl > 0 then
  redis.call('ZADD', ends, int(NOW + ttl), #bucket .. ':' .. bucket .. key)
else
  redis.call('ZREM', ends, #bucket .. ':' .. bucket .. key)
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', int(NOW), 'LIMIT', 0, 16)) do
  local length, rest = string.match(member, '^(%d+):(.*)$')
  local of_bucket, of_key = string.sub(rest, 1, tonumber(length)), string.sub(rest, tonumber(length) + 1)
  if redis.call('EXISTS', P .. 'kv:' .. of_bucket .. ':' .. of_key) == 0 then
    redis.call('HDEL', P .. 'kv:' .. of_bucket, of_key)
  end
  redis.call('ZREM', ends, member)
end
return { 'ok', revision }

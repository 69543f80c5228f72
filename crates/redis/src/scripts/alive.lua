-- Renews the sign of life of an engine; a full memory does not keep it from that. Arguments: engine, time in ms.
local key, ms = P .. 'owner:' .. arg(), arg()
if redis.call('PEXPIRE', key, ms) == 0 then redis.call('SET', key, '1', 'PX', ms) end
return 'ok'

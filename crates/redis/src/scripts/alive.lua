-- Renews the heartbeat key of an engine, even if the memory is full. Arguments: engine, time in ms.
local key, ms = P .. 'owner:' .. arg(), arg()
if redis.call('PEXPIRE', key, ms) == 0 then redis.call('SET', key, '1', 'PX', ms) end
return 'ok'

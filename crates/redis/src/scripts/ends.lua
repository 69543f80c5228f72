-- An id that is smaller than the ids of all entries that are added from now on, and the version of the registry. Ids of
-- this engine grow, and those of other programs begin at the time of the server.
local last = redis.call('GET', P .. 'last') or '0-0'
local now = int(NOW - 1) .. '-18446744073709551615'
if pad(last) < pad(now) then last = now end
return { last, redis.call('GET', P .. 'registry') or '0' }

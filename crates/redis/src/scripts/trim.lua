-- Removes events that every group has finished, from the beginning of a stream. Arguments: stream, the most
-- events that may stay (or -1), oldest time in ms that may stay (or -1), groups that must read the stream, groups of
-- the engine that do not want it. An open dead letter has a copy of its event, so the event need not stay for it.
local key, most, oldest = arg(), num(), num()
if redis.call('TYPE', key).ok ~= 'stream' then return '0' end
local want = nil
if most >= 0 then
  local length = redis.call('XLEN', key)
  if length > most then
    local from, left = '-', math.min(length - most, 5000)
    while left > 0 do
      local page = redis.call('XRANGE', key, from, '+', 'COUNT', math.min(left + 1, 500))
      if #page == 0 then break end
      want = page[#page][1]
      left = left - #page
      from = '(' .. want
      if left <= 0 then break end
    end
  end
end
if oldest >= 0 then
  local by_age = int(oldest) .. '-0'
  if not want or pad(by_age) > pad(want) then want = by_age end
end
if not want then return '0' end
local floor = nil
local function lower(id)
  local text = pad(id)
  if not floor or text < floor[1] then floor = { text, id } end
end
local must, unwanting = {}, {}
for i = 1, num() do must[i] = arg() end
for _ = 1, num() do unwanting[arg()] = true end
local groups = {}
for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local info = pairs_of(group)
  groups[info['name']] = true
  local ms, seq = split_id(info['last-delivered-id'])
  -- MINID keeps the id itself, so the last delivered event stays.
  if not unwanting[info['name']] then lower(ms .. '-' .. seq) end
  if info['pending'] > 0 then
    local first = redis.call('XPENDING', key, info['name'])[2]
    if first then lower(first) end
  end
end
for _, name in ipairs(must) do
  if not groups[name] then return '0' end
end
if floor and floor[1] < pad(want) then want = floor[2] end
redis.call('ZREMRANGEBYLEX', P .. 'addressed:' .. key, '-', '(' .. pad(want))
return tostring(redis.call('XTRIM', key, 'MINID', want))

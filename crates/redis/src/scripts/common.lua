-- Functions that all scripts share. KEYS[1] is the prefix of all keys of the engine.
local P = KEYS[1]
local SEQS = 4194304
-- The most events in one command: the number of arguments of a call is limited.
local BULK = 500

local function int(n) return string.format('%.0f', n) end

local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local NOW = clock()

local function split_id(id)
  local ms, seq = string.match(id, '^(%d+)%-(%d+)$')
  return ms, seq
end

-- An id as a text. These texts sort like the ids.
local function pad(id)
  local ms, seq = split_id(id)
  return string.rep('0', 20 - #ms) .. ms .. '-' .. string.rep('0', 20 - #seq) .. seq
end

local function of(member)
  local at = string.find(member, '@', 1, true)
  return string.sub(member, 1, at - 1), string.sub(member, at + 1)
end

-- The state of a delivered event: kind (F in flight, W waits, P waits behind another event of its key), token,
-- attempts, tag, key.
local function read_state(text)
  local kind, token, attempts, tag, okey = string.match(text, '^(%a)|(%d+)|(%d+)|([^|]*)|(.*)$')
  return kind, token, tonumber(attempts), tag, okey
end

local function state(kind, token, attempts, tag, okey)
  return kind .. '|' .. token .. '|' .. int(attempts) .. '|' .. tag .. '|' .. okey
end

-- A field of an entry that Everbus wrote. Entries of other programs may have fields of the same names.
local function field_of(fields, name)
  if fields[1] ~= 'eb' then return nil end
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
end

-- How many events after an id are addressed to other groups: the group `g` does not count them.
local function unread_of_others(key, after, g)
  local count = 0
  if g == 'everbus.archive' then return count end
  for _, noted in ipairs(redis.call('ZRANGEBYLEX', P .. 'addressed:' .. key, '(' .. pad(after) .. '~', '+')) do
    local _, group = of(noted)
    if group ~= g then count = count + 1 end
  end
  return count
end

local WAKE = false
local function wake()
  if WAKE then redis.call('XADD', P .. 'wake', 'MAXLEN', '1', '*', 'w', '1') end
end

-- Ids grow over all streams of the engine, so that events of several streams have an order.
local last_ms, last_seq
local function next_id()
  if not last_ms then
    last_ms, last_seq = 0, 0
    local kept = redis.call('GET', P .. 'last')
    if kept then
      local ms, seq = split_id(kept)
      last_ms, last_seq = tonumber(ms), tonumber(seq)
    end
    if NOW > last_ms then last_ms, last_seq = NOW, -1 end
  end
  last_seq = last_seq + 1
  if last_seq >= SEQS then last_ms, last_seq = last_ms + 1, 0 end
  return int(last_ms) .. '-' .. int(last_seq)
end

local function keep_last()
  if last_ms then redis.call('SET', P .. 'last', int(last_ms) .. '-' .. int(last_seq)) end
end

local function pairs_of(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

-- An id for a stream in which another program wrote an id that is ahead of ours: the next id of that stream. The ids of
-- other streams are not affected.
local function id_after(key)
  local info = redis.pcall('XINFO', 'STREAM', key)
  if info.err then return nil end
  local top = pairs_of(info)['last-generated-id']
  local ms, seq = split_id(top)
  if #ms > 13 or #seq > 15 or tonumber(ms) > NOW + 86400000 then return nil, top end
  seq = tonumber(seq) + 1
  if seq >= SEQS then return int(tonumber(ms) + 1) .. '-0' end
  return ms .. '-' .. int(seq)
end

local function add(key, fields)
  local id = next_id()
  local answer = redis.pcall('XADD', key, id, unpack(fields))
  if type(answer) == 'table' and answer.err then
    if not string.find(answer.err, 'equal or smaller', 1, true)
        and not string.find(answer.err, 'exhausted', 1, true) then return answer end
    local after, top = id_after(key)
    if not after then return { err = 'AHEAD ' .. key .. ' ' .. (top or '') } end
    id = after
    answer = redis.pcall('XADD', key, id, unpack(fields))
    if type(answer) == 'table' and answer.err then return answer end
  end
  return id
end

-- How many entries a stream ever had, except those that were removed again at once; and the answer of XINFO STREAM.
local function total_of(key)
  local info = redis.pcall('XINFO', 'STREAM', key)
  if info.err then return 0, {} end
  info = pairs_of(info)
  local undone = tonumber(redis.call('HGET', P .. 'undone', key) or '0')
  return info['entries-added'] - undone, info
end

-- Lets a group begin to read a stream. The engine itself counts how many entries a group has read, because the count of
-- the server is wrong after a restart, and after another program has trimmed the stream. Entries that were removed
-- before the group began count as read.
local function join_stream(g, key, name, start, make)
  local total, info = total_of(key)
  local last = info['last-generated-id'] or '0-0'
  if not info['length'] and not make then return { err = 'no stream' } end
  if start == '$' then start = last end
  local joined = redis.pcall('XGROUP', 'CREATE', key, name, start, 'MKSTREAM')
  if joined.err then return joined end
  if pad(start) == pad(last) then
    redis.call('HSET', P .. 'read:' .. g, key, int(total))
  elseif pad(start) == pad('0-0') then
    redis.call('HSET', P .. 'read:' .. g, key, int(total - info['length']))
  else
    redis.call('HDEL', P .. 'read:' .. g, key)
  end
  return joined
end

local function count_read(g, key, count)
  if count > 0 and redis.call('HEXISTS', P .. 'read:' .. g, key) == 1 then
    redis.call('HINCRBY', P .. 'read:' .. g, key, count)
  end
end

-- How many entries of a stream a group has not read; `mine` is the answer of XINFO GROUPS for the group.
local function unread_of(g, key, mine)
  local after = mine['last-delivered-id']
  local total, info = total_of(key)
  if not info['length'] or info['length'] == 0 then return 0 end
  if pad(info['recorded-first-entry-id']) > pad(after) then return info['length'] end
  if #redis.call('XRANGE', key, '(' .. after, '+', 'COUNT', 1) == 0 then return 0 end
  local read = redis.call('HGET', P .. 'read:' .. g, key)
  -- Our count is only right if no other program reads for the group.
  if read and mine['consumers'] <= 1 then return math.max(1, math.min(total - tonumber(read), info['length'])) end
  if type(mine['lag']) == 'number' then return math.max(1, math.min(mine['lag'], info['length'])) end
  local unread, from = 0, after
  while unread < 100000 do
    local page = redis.call('XRANGE', key, '(' .. from, '+', 'COUNT', 500)
    if #page == 0 then break end
    unread = unread + #page
    from = page[#page][1]
  end
  return unread
end

-- Removes an entry that was just added, because a later step was refused.
local function undo_add(key, id)
  redis.call('XDEL', key, id)
  redis.pcall('HINCRBY', P .. 'undone', key, 1)
end

-- A text that is different at every call, even after the server has lost writes.
local function nonce()
  local t = redis.call('TIME')
  return t[1] .. '.' .. t[2] .. '.' .. int(redis.call('INCR', P .. 'counter'))
end

local types = {}
local function is_stream(key)
  if types[key] == nil then
    local kind = redis.call('TYPE', key).ok
    types[key] = kind == 'stream' or kind == 'none'
  end
  return types[key]
end

local registered = {}
local function register(key, dialect)
  if registered[key] then return end
  registered[key] = true
  if redis.call('HSETNX', P .. 'streams', key, dialect) == 1 then
    redis.call('SET', P .. 'registry', nonce())
    WAKE = true
  end
end

-- The next argument.
local at = 0
local function arg()
  at = at + 1
  return ARGV[at]
end
local function num() return tonumber(arg()) end

-- An event to append: stream, dialect, name of its id, digest of its body, fields.
local function read_event()
  local event = { key = arg(), dialect = arg(), id = arg(), digest = arg(), fields = {} }
  local n = num()
  for i = 1, n do event.fields[i] = arg() end
  return event
end

-- Compares an event with what is known of its id, before anything is written. `seen` has the ids of the same call.
-- Returns why the event is refused, or nil.
local function check(event, seen)
  if not is_stream(event.key) then return { 'wrongtype', event.key } end
  local known = seen[event.id]
  if known then
    if known.digest ~= event.digest then return { 'reused', event.id } end
    event.same = known
    return nil
  end
  local kept = event.kept
  if kept == nil then kept = redis.call('GET', P .. 'id:' .. event.id) end
  if kept then
    local digest, id, key = string.match(kept, '^(%S+) (%S+) (.*)$')
    if digest ~= event.digest then return { 'reused', event.id } end
    event.at, event.key, event.known = id, key, true
  end
  seen[event.id] = event
  return nil
end

-- Asks for the ids of many events at once, for [check], before anything is written.
local function look_up(events)
  for first = 1, #events, BULK do
    local keys = {}
    for i = first, math.min(first + BULK - 1, #events) do keys[#keys + 1] = P .. 'id:' .. events[i].id end
    for i, kept in ipairs(redis.call('MGET', unpack(keys))) do events[first + i - 1].kept = kept end
  end
end

local function append(event, window)
  if event.same then return { event.same.at, event.same.key, '1' } end
  if event.known then return { event.at, event.key, '1' } end
  local id = add(event.key, event.fields)
  if type(id) == 'table' then return id end
  local known = redis.pcall('SET', P .. 'id:' .. event.id, event.digest .. ' ' .. id .. ' ' .. event.key, 'PX', window)
  if known.err then
    undo_add(event.key, id)
    return known
  end
  event.at = id
  register(event.key, event.dialect)
  local group = field_of(event.fields, 'to')
  if group then redis.call('ZADD', P .. 'addressed:' .. event.key, 0, pad(event.at) .. '@' .. group) end
  return { event.at, event.key, '0' }
end

-- Appends events: all of them or none. Returns the error, or the answers.
local function append_all(events, window)
  local answers, done = {}, {}
  for i, event in ipairs(events) do
    local answer = append(event, window)
    if answer.err then
      for _, one in ipairs(done) do
        undo_add(one.key, one.at)
        redis.call('DEL', P .. 'id:' .. one.id)
        local group = field_of(one.fields, 'to')
        if group then redis.call('ZREM', P .. 'addressed:' .. one.key, pad(one.at) .. '@' .. group) end
      end
      return answer.err, done
    end
    if answer[3] == '0' then done[#done + 1] = event end
    answers[i] = answer
  end
  return nil, answers, done
end

-- If the memory is full, the server refuses a script whose first write needs memory. The write here needs none, and
-- after it the script may write: claims, verdicts and extensions free memory in the end.
local function begin(g) redis.call('ZREM', P .. 'lease:' .. g, '') end

-- The sorted set of due times, one for each group and stream.
local function due_set(g, key) return P .. 'due:' .. #g .. ':' .. g .. ':' .. key end

-- The sorted set with the unfinished events of a key in an ordered group, oldest first.
local function key_set(g, okey) return P .. 'key:' .. #g .. ':' .. g .. ':' .. okey end

local function wait_until(g, member, due, attempts, okey)
  redis.call('HSET', P .. 'st:' .. g, member, state('W', '0', attempts, '', okey))
  redis.call('ZREM', P .. 'lease:' .. g, member)
  local _, key = of(member)
  redis.call('ZADD', due_set(g, key), int(due), member)
end

-- Makes the first event of a key due, if it waited behind another event.
local function promote(g, okey)
  if okey == '' then return end
  local head = redis.call('ZRANGE', key_set(g, okey), 0, 0)[1]
  if not head then return end
  local ms, seq, rest = string.match(head, '^0*(%d+)%-0*(%d+)@(.*)$')
  local next = ms .. '-' .. seq .. '@' .. rest
  local text = redis.call('HGET', P .. 'st:' .. g, next)
  if not text then return end
  local kind, _, attempts = read_state(text)
  if kind == 'P' then
    wait_until(g, next, NOW, attempts, okey)
    WAKE = true
  end
end

-- Removes a finished event from its key, and makes the next event of the key due.
local function finish_key(g, member, okey)
  if okey == '' then return end
  local id, key = of(member)
  redis.call('ZREM', key_set(g, okey), pad(id) .. '@' .. key)
  promote(g, okey)
end

-- Removes entries from the pending list of a group. If the key is no longer a stream, it has no pending list, and this
-- is not an error. Returns the error if the server refuses.
local function ack_entries(key, name, ids)
  local acked = redis.pcall('XACK', key, name, unpack(ids))
  if type(acked) == 'table' and not string.find(acked.err, 'WRONGTYPE', 1, true) then return acked.err end
end

-- Finishes an event for a group: it is acked, and its state is removed.
local function finish(g, name, member, okey)
  local id, key = of(member)
  local refused = ack_entries(key, name, { id })
  if refused then error({ err = refused }) end
  redis.call('HDEL', P .. 'st:' .. g, member)
  redis.call('ZREM', P .. 'lease:' .. g, member)
  redis.call('ZREM', due_set(g, key), member)
  redis.call('HDEL', P .. 'fail:' .. g, member)
  redis.call('HDEL', P .. 'again:' .. g, member)
  finish_key(g, member, okey)
end

-- Redelivers an event to a group that has finished it or did not want it.
local function revive(g, name, member, ordered, fields)
  local id, key = of(member)
  join_stream(g, key, name, '$')
  redis.call('XCLAIM', key, name, 'everbus', 0, id, 'FORCE', 'JUSTID')
  local okey = ordered and field_of(fields, 'k') or ''
  redis.call('HSET', P .. 'again:' .. g, member, '1')
  if okey ~= '' then redis.call('ZADD', key_set(g, okey), 0, pad(id) .. '@' .. key) end
  wait_until(g, member, NOW, 0, okey)
  WAKE = true
end

-- Closes a dead letter: moves it from its stream of dead letters to the stream `letters`.
local function close_letter(g, member, letter, stamp, by)
  local id, key = of(letter)
  local entry = redis.call('XRANGE', key, id, id)[1]
  if entry then
    local fields = entry[2]
    fields[#fields + 1] = 'retried_at'
    fields[#fields + 1] = stamp
    fields[#fields + 1] = 'replaced_by'
    fields[#fields + 1] = by
    local kept = redis.call('XADD', P .. 'letters', '*', unpack(fields))
    redis.call('XDEL', key, id)
    local before = redis.call('HGET', P .. 'old:' .. g, member)
    if before then redis.call('XDEL', P .. 'letters', before) end
    redis.call('HSET', P .. 'old:' .. g, member, kept)
  end
  redis.call('HDEL', P .. 'dead:' .. g, member)
end

local function skip(g, member, reason)
  return redis.pcall('XADD', P .. 'skips', 'MAXLEN', '~', '100000', '*', 'group', g, 'event', member, 'reason', reason)
end

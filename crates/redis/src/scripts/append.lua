-- Appends a batch: all of it or nothing. Arguments: window in ms, number of events, events.
local window, n = arg(), num()
local events, seen = {}, {}
for i = 1, n do events[i] = read_event() end
look_up(events)
for i = 1, n do
  local refused = check(events[i], seen)
  if refused then return { 'no', tostring(i), refused[1], refused[2] } end
end
local failed, answers = append_all(events, window)
keep_last()
wake()
if failed then return { 'no', '0', 'failed', failed } end
table.insert(answers, 1, 'ok')
return answers

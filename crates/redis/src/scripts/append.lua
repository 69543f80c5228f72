-- Appends a batch: all of it or nothing. Arguments: window in ms, number of events, events.
local window, n = arg(), num()
local events, seen = {}, {}
for i = 1, n do
  events[i] = read_event()
  local refused = check(events[i], seen)
  if refused then return { 'no', tostring(i), refused[1], refused[2] } end
end
local answers = { 'ok' }
for i = 1, n do
  local answer = append(events[i], window)
  if answer.err then return answer end
  answers[i + 1] = answer
end
keep_last()
wake()
return answers

# The children of the tests: what each does is in its name.
case "$EVERBUS_TASK_NAME" in
echo) cat ;;
reads-nothing) echo '{"done":true}' ;;
environment) env | cut -d= -f1 | sort | tr '\n' ' ' | sed 's/^/"/; s/ $/"/' ;;
who) echo "[\"$EVERBUS_REQUEST_ID\",\"$EVERBUS_JOB_ID\",\"$EVERBUS_ATTEMPT\",\"$EVERBUS_TENANT\"]" ;;
usage)
  echo '{"everbus":"usage","inputTokens":12000,"outputTokens":3500,"cacheReadTokens":8000}'
  echo '{"everbus":"output","value":{"colors":7}}'
  echo 'this line is not the output'
  ;;
not-json) echo 'all is well' ;;
descriptor)
  echo 'for people'
  echo '{"everbus":"usage","inputTokens":1,"outputTokens":2,"cacheReadTokens":3}'
  printf '{"colors":\n' > "/dev/fd/$EVERBUS_OUTPUT_FD"
  echo '8}' > "/dev/fd/$EVERBUS_OUTPUT_FD"
  ;;
descriptor-not-json) echo 'all is well' > "/dev/fd/$EVERBUS_OUTPUT_FD" ;;
descriptor-huge) head -c 100000000 /dev/zero > "/dev/fd/$EVERBUS_OUTPUT_FD" ;;
huge) head -c 100000000 /dev/zero | tr '\0' x ;;
forever) while :; do echo 0123456789; done ;;
forever-stderr) while :; do echo 0123456789; done >&2 ;;
leaves-a-process)
  sleep 1000 &
  echo "{\"left\":$!}"
  ;;
stubborn)
  trap '' TERM
  echo "$$" > "$PIDS/$EVERBUS_REQUEST_ID"
  while :; do sleep 0.05; done
  ;;
polite)
  trap 'exit 3' TERM
  while :; do sleep 0.05; done
  ;;
sleeps)
  echo "$$" > "$PIDS/$EVERBUS_REQUEST_ID"
  exec sleep 1000
  ;;
closes-its-pipes)
  exec <&- >&- 2>&-
  sleep 0.1
  exit 0
  ;;
segfault) kill -SEGV $$ ;;
long-error)
  printf '{"everbus":"error","category":"auth","message":"'
  head -c 300000 /dev/zero | tr '\0' x
  echo '"}'
  exit 1
  ;;
large)
  printf '"'
  head -c 2000000 /dev/zero | tr '\0' x
  echo '"'
  ;;
killed) kill -KILL $$ ;;
auth)
  echo '{"everbus":"error","category":"auth","message":"Invalid API key"}'
  exit 1
  ;;
network)
  echo 'trying' >&2
  echo 'Error: connect ECONNREFUSED 127.0.0.1:9' >&2
  exit 1
  ;;
flaky)
  if [ "$EVERBUS_ATTEMPT" = 1 ]; then
    echo 'upstream answered 503' >&2
    exit 1
  fi
  echo '{"attempt":'"$EVERBUS_ATTEMPT"'}'
  ;;
unreadable)
  echo 'bad field' >&2
  exit 65
  ;;
hungry) exec python3 -c 'x = bytearray(600_000_000); print(len(x))' ;;
reports)
  echo '{"everbus":"activity","type":"step_running","stepName":"color-tags"}'
  while [ ! -e "$PIDS/go" ]; do sleep 0.02; done
  echo '{"done":true}'
  ;;
waits)
  echo "$$" > "$PIDS/$EVERBUS_REQUEST_ID"
  while [ ! -e "$PIDS/go" ]; do sleep 0.02; done
  echo '{"attempt":'"$EVERBUS_ATTEMPT"'}'
  ;;
*) echo "unknown child" >&2; exit 70 ;;
esac

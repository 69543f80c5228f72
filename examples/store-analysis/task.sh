#!/bin/sh
# One program for all tasks of the job. It reads the input as JSON and prints its result as the last line.
# COLOR_API says whether the service behind color-tags works.
input=$(cat)
echo '{"everbus":"activity","type":"step_running","stepName":"'"$EVERBUS_TASK_NAME"'"}'
case $EVERBUS_TASK_NAME in
  scrape-store) echo '{"products": 12}' ;;
  analyze-competitors)
    # The network fails once: an error that is worth another attempt.
    if [ "$EVERBUS_ATTEMPT" = 1 ]; then
      echo '{"everbus":"error","category":"network","message":"ECONNRESET"}'
      exit 1
    fi
    echo '{"competitors": 3}' ;;
  color-tags)
    if [ "$COLOR_API" != on ]; then
      echo '{"everbus":"error","category":"auth","message":"Invalid API key"}'
      exit 1
    fi
    echo '{"colors": ["red", "blue"]}' ;;
  font-pairing) echo '{"fonts": ["Inter"]}' ;;
  compile-result)
    case $input in
      *colors*fonts*) echo '{"report": "done"}' ;;
      *) echo "the results of the parents are missing: $input" >&2; exit 65 ;;
    esac ;;
esac

"""A service of the framework specification, on FastStream.

service.py URL consume STREAM GROUP COUNT   prints the JSON of COUNT events, and ends
service.py URL publish STREAM               publishes what it reads on standard input, one JSON document per line;
                                            an object with "headers" and "event" has headers of its own
"""

import asyncio
import json
import sys

from faststream.redis import RedisBroker, StreamSub


async def consume(url, stream, group, count):
    broker = RedisBroker(url, logger=None)
    done = asyncio.Event()
    seen = 0

    @broker.subscriber(stream=StreamSub(stream, group=group, consumer="python", polling_interval=10))
    async def handle(event: dict):
        nonlocal seen
        print(json.dumps(event), flush=True)
        seen += 1
        if seen >= count:
            done.set()

    await broker.start()
    print("ready", flush=True)
    await asyncio.wait_for(done.wait(), 60)
    # The message is acked after its handler.
    await asyncio.sleep(0.5)
    await (broker.stop if hasattr(broker, "stop") else broker.close)()


async def publish(url, stream):
    async with RedisBroker(url, logger=None) as broker:
        for line in sys.stdin:
            document = json.loads(line)
            headers = None
            if "headers" in document:
                document, headers = document["event"], document["headers"]
            await broker.publish(document, stream=stream, headers=headers)
    print("published", flush=True)


if sys.argv[2] == "consume":
    asyncio.run(consume(sys.argv[1], sys.argv[3], sys.argv[4], int(sys.argv[5])))
else:
    asyncio.run(publish(sys.argv[1], sys.argv[3]))

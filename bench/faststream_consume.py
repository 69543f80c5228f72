"""Consumes a stream with FastStream, and prints the seconds from its first message to its last.

faststream_consume.py URL STREAM GROUP COUNT

The messages are there before. Each one is acked after its handler.
"""

import asyncio
import sys
import time

import redis.asyncio
from faststream.redis import RedisBroker, StreamSub


async def main(url, stream, group, count):
    client = redis.asyncio.from_url(url)
    await client.xgroup_create(stream, group, id="0")
    await client.aclose()
    broker = RedisBroker(url, logger=None)
    done = asyncio.Event()
    seen, began = 0, None
    sub = StreamSub(stream, group=group, consumer="python", max_records=500, polling_interval=10)

    @broker.subscriber(stream=sub)
    async def handle(event: dict):
        nonlocal seen, began
        if began is None:
            began = time.monotonic()
        seen += 1
        if seen >= count:
            done.set()

    await broker.start()
    await done.wait()
    print(time.monotonic() - began, flush=True)
    await (broker.stop if hasattr(broker, "stop") else broker.close)()


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))

"""A service without Everbus: it publishes a message.received and prints the identity.resolved that follows.

    pip install nats-py
    python message.py nats://127.0.0.1:4222 < message.json

Standard input has the whole document: type, payload, id, timestamp, source.
"""

import asyncio
import sys

import nats


async def main(url: str, document: bytes) -> None:
    client = await nats.connect(url)
    answers = await client.subscribe("identity.resolved")
    await client.flush()
    # The server answers once the message is stored.
    await client.jetstream().publish("message.received", document)
    answer = await answers.next_msg(timeout=60)
    print(answer.data.decode())
    await client.close()


asyncio.run(main(sys.argv[1], sys.stdin.buffer.read()))

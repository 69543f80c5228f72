"""Publishes with the CloudEvents SDK in binary, structured and batch mode: python3 cloudevents_client.py URL.

Prints one line of JSON for each request: its mode, the status and the answer.
"""

import json
import sys
import urllib.request
from datetime import datetime, timezone

from cloudevents.core.bindings.http import to_binary_event, to_structured_event
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent


def event(number, data):
    return CloudEvent(
        attributes={
            "id": f"sdk-{number}",
            "source": "/sdk/python",
            "type": "orders.order.placed",
            "subject": f"order {number} – Zürich",
            "time": datetime(2026, 3, 1, 12, 0, number, tzinfo=timezone.utc),
            "datacontenttype": "application/json",
            "comexampleextension": "kept",
        },
        data=data,
    )


def post(mode, headers, body):
    request = urllib.request.Request(sys.argv[1], data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = {"mode": mode, "status": answer.status, "answer": json.load(answer)}
    print(json.dumps(told), flush=True)


binary = to_binary_event(event(1, {"total": 1.5, "town": "Zürich"}))
post("binary", binary.headers, binary.body)
structured = to_structured_event(event(2, {"total": 2.5, "town": "Zürich"}))
post("structured", structured.headers, structured.body)
events = [JSONFormat().write(event(number, {"total": number})) for number in (3, 4)]
post(
    "batch",
    {"content-type": "application/cloudevents-batch+json"},
    b"[" + b",".join(events) + b"]",
)
# The same once more: a client that did not get its answer.
post("again", binary.headers, binary.body)

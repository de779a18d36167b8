#!/usr/bin/env python3
"""A cache-aware router: which pod holds the longest prefix of a prompt.

    python examples/router.py pod-a=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558 pod-b=...

Prompts are JSON lines on stdin: {"token_ids": [...]}, with "lora_name" and "salt" where the request has them. Each
is answered by a line on stdout: {"pod": "pod-a", "tokens": 512, "media": {"CPU": 512}, "catching_up": []}. pod null
is any; catching_up are pods of which not all is known yet.
"""

import asyncio
import json
import sys

from kvevents_service import PrefixIndex, Source, Subscriber


def route(index: PrefixIndex, subscriber: Subscriber, prompt: dict[str, object]) -> dict[str, object]:
    catching_up = sorted(subscriber.catching_up)
    found = index.match(prompt.pop("token_ids"), **prompt)
    if not found:
        return {"pod": None, "tokens": 0, "media": {}, "catching_up": catching_up}
    publisher, held = max(found.items(), key=lambda pair: pair[1].tokens)
    return {"pod": publisher.label, **held._asdict(), "catching_up": catching_up}


async def follow(index: PrefixIndex, subscriber: Subscriber) -> None:
    async for item in subscriber:
        index.take(item)


async def main(pods: list[str]) -> None:
    index = PrefixIndex()
    named = (pod.partition("=") for pod in pods)
    sources = [Source(*endpoints.split(","), label=label) for label, _, endpoints in named]
    async with Subscriber(sources, stale_after_s=10, read_tokens=True) as subscriber:
        following = asyncio.create_task(follow(index, subscriber))
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(route(index, subscriber, json.loads(line))), flush=True)
        following.cancel()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1:]))

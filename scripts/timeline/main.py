"""Prints where the time of one request went, as a node has recorded it.

    explain.py                  the newest room of the node at --url
    explain.py ROOM             that room
    explain.py --url URL        asks another node than the quickstart's decode node

Exit codes: 0; 1 there is no such room; 2 no answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import httpx
import msgspec
from cluster.node import PLAIN_HTTP

from server.telemetry.record import RoomList, RoomRecord
from timeline.drawing import draw

DEFAULT_URL = "http://127.0.0.1:30001"
TIMEOUT_S = 10.0


class NoRecord(Exception):
    """The node keeps no record of it. The message is for the user."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="explain.py",
        description="Where the time of one request went, as its node has recorded it.",
    )
    parser.add_argument("room", nargs="?", metavar="ROOM", help="as the header x-pd-room says it (default: the newest)")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the node to ask (default: {DEFAULT_URL})")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the node's API key")
    parser.add_argument("--width", type=int, default=48, metavar="N", help="characters of a bar (default: 48)")
    return parser.parse_args(argv)


def fetch(url: str, room: str | None, key: str | None) -> RoomRecord:
    """One record. Raises :class:`NoRecord`, or an ``httpx.HTTPError`` for no answer."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers, **PLAIN_HTTP) as client:
        if room is not None:
            response = client.get(f"/rooms/{room}")
            if response.status_code in (400, 404):
                raise NoRecord(response.json()["error"]["message"])
            return msgspec.json.decode(response.raise_for_status().content, type=RoomRecord)
        response = client.get("/rooms", params={"limit": 1}).raise_for_status()
        listed = msgspec.json.decode(response.content, type=RoomList)
    newest = (*listed.ended, *listed.running)
    if not newest:
        raise NoRecord(f"the node at {url} has no room yet")
    return newest[0]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = fetch(args.url, args.room, os.environ.get(args.api_key_env) if args.api_key_env else None)
    except NoRecord as error:
        print(error, file=sys.stderr)
        return 1
    except (httpx.HTTPError, msgspec.DecodeError, ValueError) as error:
        print(f"{args.url} gave no answer that can be read: {error}", file=sys.stderr)
        return 2
    print(draw(record, max(10, args.width)))
    return 0

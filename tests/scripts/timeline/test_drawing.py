"""The timeline of a record: one bar for each phase, and sums that say whether they are right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from timeline.drawing import draw
from timeline.main import main

from server.telemetry.record import RoomList, RoomRecord

DOCUMENT = Path(__file__).parents[3] / "docs" / "rooms.md"
RECORD = msgspec.json.decode(
    re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0], type=RoomRecord
)
WIDTH = 40


def bars(text: str) -> dict[str, str]:
    found = re.findall(r"^(\w+) +[\d.]+ ms  \|(.*)\|$", text, re.MULTILINE)
    return dict(found)


def test_bars_stand_side_by_side_and_the_sum_is_the_ttft() -> None:
    text = draw(RECORD, WIDTH)
    drawn = bars(text)
    assert list(drawn) == [phase.name for phase in RECORD.phases]
    assert {len(bar) for bar in drawn.values()} == {WIDTH}
    assert "=" in drawn["prefill"]
    assert "#" not in drawn["prefill"]
    assert drawn["decode"].endswith("#")
    (line,) = re.findall(r"TTFT: (.*)", text)
    parts, total = line.split(" = ")
    assert sum(int(float(part) * 1000 + 0.5) for part in parts.split(" + ")) == RECORD.ttft_us
    assert total == "41.200 ms"


def test_a_sum_that_is_wrong_is_said_to_be() -> None:
    wrong = msgspec.structs.replace(RECORD, ttft_us=41_201, total_us=None)
    assert "is not 41.201 ms" in draw(wrong, WIDTH)


def test_a_room_that_runs_has_an_open_end() -> None:
    first = msgspec.structs.replace(RECORD.phases[0], end_us=None)
    running = msgspec.structs.replace(
        RECORD, phase="receive", outcome=None, ttft_us=None, total_us=None, phases=(first,), attempts=(), transfer=None
    )
    text = draw(running, WIDTH)
    assert "in phase receive" in text
    assert "..." in text


class Rooms(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = 200, msgspec.json.encode(RECORD)
        if self.path.startswith("/rooms?"):
            body = msgspec.json.encode(RoomList("decode", 8, (), (RECORD,), ()))
        elif not self.path.endswith(RECORD.room):
            status, body = 404, json.dumps({"error": {"message": "no record of room 7"}}).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def a_node() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Rooms) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_newest_room_or_a_named_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with a_node() as url:
        assert main(["--url", url]) == 0
        newest = capsys.readouterr().out
        assert main([RECORD.room, "--url", url]) == 0
        assert capsys.readouterr().out == newest
        assert main(["7", "--url", url]) == 1
        assert "no record of room 7" in capsys.readouterr().err
    assert main(["--url", url]) == 2

"""Follows one request through a real pair of processes and compares what ran with docs/lifecycle.md.

    lifecycle.py            says what differs, and how far one has to walk: stays, files, returns, lines
    lifecycle.py --calls    every function that ran for the request, in the order of its first call

Exit codes: 0 the page is true; 1 it is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from cluster import Cluster, Node
from cluster.node import ROOT

from walk import recorder
from walk.page import Page
from walk.way import Counts, Way, Window, differences

PAGE = ROOT / "docs" / "lifecycle.md"
IDLE_S = 3.0
"""Long enough for everything that a node does again and again."""
BODY = {"prompt": "Question: Tom has 8 bags with 8 books each. How many books does Tom have?\nAnswer:", "max_tokens": 8}


def record(folder: Path) -> Way:
    """Starts a pair, leaves it idle, asks one question, and ends it: what ran for the question."""
    nodes: list[Node] = []
    for role, options in (("prefill", ()), ("decode", ("--spec-tokens", "2"))):
        program = [sys.executable, recorder.__file__, str(folder / f"{role}.json"), f"server.{role}"]
        more = ("--prefill", nodes[0].address, *options) if nodes else ()
        nodes.append(Node(role, folder / f"{role}.log", *more, program=program))
    decode = nodes[1]
    with Cluster(nodes).running():
        for _ in range(2):  # the first one meets what is built once
            decode.http.post("/v1/completions", json=BODY).raise_for_status()
        time.sleep(IDLE_S / 3)
        idle = Window(time.monotonic_ns(), time.monotonic_ns() + int(IDLE_S * 1e9))
        time.sleep(IDLE_S)
        begin = time.monotonic_ns()
        decode.http.post("/v1/completions", json=BODY).raise_for_status()
        time.sleep(IDLE_S / 3)  # both nodes give the request's memory back
        request = Window(begin, time.monotonic_ns())
    recorded = {"P": recorder.read(folder / "prefill.json"), "D": recorder.read(folder / "decode.json")}
    return Way.of(recorded, idle, request)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="scripts/lifecycle.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calls", action="store_true", help="list every function that ran for the request")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        way = record(Path(folder))
    if args.calls:
        firsts = [(at[0], node, place) for node, places in way.calls.items() for place, at in places.items()]
        for at, node, place in sorted(firsts, key=lambda first: first[0]):
            print(f"{(at - min(firsts, key=lambda first: first[0])[0]) / 1e6:9.2f} ms  {node}  {place}")
        return 0
    page = Page.read(PAGE)
    print(", ".join(f"{name.replace('_', ' ')} {n}" for name, n in asdict(Counts.of(page, way)).items()))
    found = differences(page, way)
    print("\n".join(found) or "the page is true")
    return 1 if found else 0

"""docs/protocol.md names every message, field and deadline there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import msgspec

from server.transfer import manifest, protocol
from server.transfer.rooms import Deadlines

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
NAMED = set(re.findall(r"`([A-Za-z_0-9]+)", TEXT))
STRUCTS = [
    *get_args(protocol.AnyMessage),
    protocol.RoomRequest,
    protocol.RoutedRequest,
    protocol.Sampling,
    protocol.Sent,
    protocol.SentPromptLogprobs,
    protocol.Timings,
    manifest.Manifest,
    manifest.ComponentEntry,
]


def test_every_message_and_field_is_documented() -> None:
    missing = {m.__name__ for m in get_args(protocol.AnyMessage)} - NAMED
    missing |= {f"{s.__name__}.{f.name}" for s in STRUCTS for f in msgspec.structs.fields(s) if f.name not in NAMED}
    assert not missing


def test_every_deadline_is_documented_with_its_default() -> None:
    for field in fields(Deadlines):
        assert re.search(rf"`{field.name}`( \||\s*\(| =) *{field.default:g}\b", TEXT), field.name


def test_the_version_is_documented() -> None:
    version = manifest.PROTOCOL_VERSION
    for said in (f"version {version}", f"version, `{version}`", f"| `protocol_version` | {version} |"):
        assert said in TEXT

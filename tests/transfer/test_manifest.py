"""Peers that do not fit are refused, and the refusal names the field."""

from __future__ import annotations

import msgspec
import pytest

from server.transfer.manifest import PROTOCOL_VERSION, Manifest, compare
from tests.transfer.support import make_geometry, make_manifest

PREFILL = make_manifest("prefill")


def change_component(manifest: Manifest, name: str, **changes: object) -> Manifest:
    entries = tuple(
        msgspec.structs.replace(entry, **changes) if entry.name == name else entry for entry in manifest.components
    )
    return msgspec.structs.replace(manifest, components=entries)


def without(manifest: Manifest, name: str) -> Manifest:
    return msgspec.structs.replace(manifest, components=tuple(c for c in manifest.components if c.name != name))


def test_equal_peers_agree_in_both_directions() -> None:
    decode = make_manifest("decode")
    assert compare(PREFILL, decode) is None
    assert compare(decode, PREFILL) is None


def test_rings_items_and_draft_tokens_may_differ() -> None:
    decode = make_manifest("decode", make_geometry(slots=9, pages=40, extra_rows=3), spec_tokens=3)
    assert compare(PREFILL, decode) is None
    assert compare(decode, PREFILL) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", PROTOCOL_VERSION + 1),
        ("transport_kind", "mooncake"),
        ("transport", "rdma"),
        ("model", "model-b"),
        ("tokenizer", "tokenizer-b"),
        ("dtype", "bfloat16"),
        ("page_size", 128),
        ("window", 8),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(field: str, value: object) -> None:
    mismatch = compare(PREFILL, make_manifest("decode", **{field: value}))
    assert mismatch is not None
    assert mismatch.field == field
    assert mismatch.theirs == str(value)
    assert str(mismatch) == f"{field} differs: ours {mismatch.ours}, theirs {mismatch.theirs}"


def test_two_prefill_nodes_do_not_pair() -> None:
    mismatch = compare(PREFILL, make_manifest("prefill"))
    assert mismatch is not None
    assert mismatch.field == "role"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", 2),
        ("layer_ids", (0, 1, 2)),
        ("width", 9),
        ("dtype", "bfloat16"),
        ("row_nbytes", 64),
        ("scope", "page"),
    ],
)
def test_a_component_that_differs_is_named(field: str, value: object) -> None:
    mismatch = compare(PREFILL, change_component(make_manifest("decode"), "swa", **{field: value}))
    assert mismatch is not None
    assert mismatch.field == f"components.swa.{field}"


@pytest.mark.parametrize("name", [entry.name for entry in PREFILL.components])
def test_a_component_that_is_read_but_not_offered_is_named_on_both_sides(name: str) -> None:
    poorer, decode = without(PREFILL, name), make_manifest("decode")
    for ours, theirs in ((poorer, decode), (decode, poorer)):
        mismatch = compare(ours, theirs)
        assert mismatch is not None
        assert mismatch.field == f"components.{name}"
        assert "absent" in (mismatch.ours, mismatch.theirs)


def test_a_draft_component_without_a_draft_on_the_other_side_is_named() -> None:
    mismatch = compare(PREFILL, make_manifest("decode", make_geometry(draft=True)))
    assert mismatch is not None
    assert mismatch.field == "components.draft_swa"
    assert compare(make_manifest("prefill", make_geometry(draft=True)), make_manifest("decode")) is None


@pytest.mark.parametrize(
    "changes", [{"offset": 0}, {"offset": 1 << 40}, {"items": 1 << 30}, {"rows": 1 << 30}, {"item_stride": 1 << 40}]
)
def test_a_component_outside_its_arena_is_refused(changes: dict[str, object]) -> None:
    mismatch = compare(PREFILL, change_component(make_manifest("decode"), "swa", **changes))
    assert mismatch is not None
    assert mismatch.field == "components.swa.offset"


def test_a_component_named_twice_is_refused() -> None:
    decode = make_manifest("decode")
    mismatch = compare(PREFILL, msgspec.structs.replace(decode, components=(*decode.components, decode.components[0])))
    assert mismatch is not None
    assert mismatch.field == "components"


def test_the_layout_survives_the_manifest() -> None:
    geometry = make_geometry(extra_rows=2, draft=True)
    manifest = make_manifest("decode", geometry)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest).layout() == manifest.layout()

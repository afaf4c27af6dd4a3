"""Peers that do not fit are refused, and the refusal names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.transfer.manifest import PROTOCOL_VERSION, ComponentEntry, Manifest, compare, refusal_label
from tests.transfer.support import make_geometry, make_manifest

PREFILL = make_manifest("prefill")


def change_component(manifest: Manifest, name: str, /, **changes: object) -> Manifest:
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


REFUSED: dict[str, Any] = {
    "protocol_version": PROTOCOL_VERSION + 1,
    "role": "prefill",
    "transport_kind": "mooncake",
    "transport": "rdma",
    "model": "model-b",
    "tokenizer": "tokenizer-b",
    "dtype": "bfloat16",
    "numerics": "official",
    "kernels": "kernels-b",
    "page_size": 128,
    "window": 8,
}
"""Fields of a decode node's manifest with a value that this prefill node cannot work with."""
FREE: dict[str, tuple[str, Any]] = {
    "incarnation": ("it names the process", "c" * 32),
    "transport_version": ("the engines settle that between themselves", "2"),
    "session": ("it is an address", "10.0.0.1:15000"),
    "spec_tokens": ("rows are paired by logical position, whatever the rings are", 5),
    "deterministic": ("a node may promise more than its peer", False),
    "arena_base": ("it is an address", 1 << 30),
    "arena_nbytes": ("sizes of memory may differ; that the components lie inside is checked", 1 << 40),
    "components": ("compared entry by entry, below", ()),
}
"""Fields that may differ: why, and another value."""
REFUSED_IN_A_COMPONENT: dict[str, object] = {
    "name": "swa2",
    "scope": "page",
    "positions": 2,
    "layer_ids": (0, 1, 2),
    "width": 9,
    "dtype": "bfloat16",
    "row_nbytes": 64,
}
FREE_IN_A_COMPONENT: dict[str, tuple[str, object]] = {
    "rows": ("rings may differ; rows of a page component may not, see below", 20),
    "items": ("each side has as many slots and pages as it likes", 2),
    "offset": ("where it lies is its owner's business, inside the arena", 8192),
    "item_stride": ("where it lies is its owner's business, inside the arena", 4096),
}


def names_of(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def test_every_field_is_either_compared_or_free_for_a_reason() -> None:
    assert REFUSED.keys() | FREE.keys() == names_of(Manifest)
    assert REFUSED.keys() & FREE.keys() == set()
    assert REFUSED_IN_A_COMPONENT.keys() | FREE_IN_A_COMPONENT.keys() == names_of(ComponentEntry)
    assert REFUSED_IN_A_COMPONENT.keys() & FREE_IN_A_COMPONENT.keys() == set()


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_differs_is_named_with_both_values_on_either_side(field: str) -> None:
    decode = make_manifest("decode", **{field: REFUSED[field]})
    at_p, at_d = compare(PREFILL, decode), compare(decode, PREFILL)
    assert at_p is not None
    assert at_d is not None
    assert at_p.field == at_d.field == field
    assert at_p.theirs == at_d.ours == str(REFUSED[field])
    assert at_p.ours == at_d.theirs == str(getattr(PREFILL, field))
    assert str(at_p) == f"{field} differs: ours {at_p.ours}, theirs {at_p.theirs}"


@pytest.mark.parametrize("field", [name for name in FREE if name != "components"])
def test_a_field_that_is_free_may_differ(field: str) -> None:
    decode = make_manifest("decode", **{field: FREE[field][1]})
    assert compare(PREFILL, decode) is None
    assert compare(decode, PREFILL) is None


@pytest.mark.parametrize(("at_p", "at_d"), [(False, False), (True, False), (False, True)])
def test_other_kernels_are_accepted_where_neither_side_promises_equal_bits(at_p: bool, at_d: bool) -> None:
    prefill = make_manifest("prefill", deterministic=at_p)
    decode = make_manifest("decode", deterministic=at_d, kernels="kernels-b")
    for ours, theirs in ((prefill, decode), (decode, prefill)):
        mismatch = compare(ours, theirs)
        assert (mismatch.field if mismatch else None) == ("kernels" if at_p or at_d else None)


@pytest.mark.parametrize("field", REFUSED_IN_A_COMPONENT)
def test_a_component_that_differs_is_named_on_either_side(field: str) -> None:
    decode = change_component(make_manifest("decode"), "swa", **{field: REFUSED_IN_A_COMPONENT[field]})
    for ours, theirs in ((PREFILL, decode), (decode, PREFILL)):
        mismatch = compare(ours, theirs)
        assert mismatch is not None
        assert mismatch.field == ("components.swa2" if field == "name" else f"components.swa.{field}")


@pytest.mark.parametrize("field", FREE_IN_A_COMPONENT)
def test_where_a_component_lies_is_free(field: str) -> None:
    value = FREE_IN_A_COMPONENT[field][1]
    decode = change_component(make_manifest("decode", arena_nbytes=1 << 40), "swa", **{field: value})
    assert compare(PREFILL, decode) is None
    assert compare(decode, PREFILL) is None


def test_rows_of_a_page_component_may_not_differ() -> None:
    decode = change_component(make_manifest("decode", arena_nbytes=1 << 40), "c4_kv", rows=65)
    for ours, theirs in ((PREFILL, decode), (decode, PREFILL)):
        mismatch = compare(ours, theirs)
        assert mismatch is not None
        assert mismatch.field == "components.c4_kv.rows"


@pytest.mark.parametrize("field", sorted(names_of(Manifest)))
def test_a_field_that_is_missing_is_refused(field: str) -> None:
    content = msgspec.to_builtins(make_manifest("decode"))
    del content[field]
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(content, Manifest)


@pytest.mark.parametrize(
    ("field", "label"),
    [
        ("model", "model"),
        ("auth", "auth"),
        ("peers", "peers"),
        ("components.swa", "components.swa"),
        ("components.swa.row_nbytes", "components.swa.row_nbytes"),
        ("components.evil", "other"),
        ("components.swa.evil", "other"),
        ("model.evil", "other"),
        ("evil", "other"),
    ],
)
def test_only_names_of_ours_become_labels_of_the_metrics(field: str, label: str) -> None:
    assert refusal_label(field) == label


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

"""``abi.py`` has what ``kernels.h`` declares: every field, in its order and of its type, and every number."""

from __future__ import annotations

import ctypes
import re
from enum import IntEnum
from pathlib import Path

import pytest

from server.kernels import abi
from server.kernels.build import SOURCES

HEADER = re.sub(r"//.*", "", (SOURCES / "kernels.h").read_text(encoding="utf-8"))
PLAIN = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
STRUCTURES = {structure.__name__: structure for structure in abi.STRUCTURES}
POINTERS_TO_STRUCTURES = {ctypes.POINTER(structure) for structure in abi.STRUCTURES}


def declared(name: str) -> list[tuple[str, str, bool]]:
    """The fields of a structure in the header: name, type, and whether it is a pointer."""
    (body,) = re.findall(rf"struct {name} {{(.*?)}};", HEADER, re.DOTALL)
    found = []
    for statement in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        type_name, rest = re.fullmatch(r"(?:const )?(\w+)((?:[ *,]|const|\w)*)", statement).groups()  # type: ignore[union-attr]
        for one in rest.split(","):
            found.append((re.sub(r"\bconst\b|[ *]", "", one), type_name, "*" in one))
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_has_the_fields_of_the_header(name: str) -> None:
    mirrored = STRUCTURES[name]._fields_
    fields = declared(name)
    assert [field[0] for field in mirrored] == [field for field, _, _ in fields]
    for (field, mirror, *_), (_, type_name, is_pointer) in zip(mirrored, fields, strict=True):
        if is_pointer:
            assert mirror is ctypes.c_void_p or mirror in POINTERS_TO_STRUCTURES or field == "blocks", field
            if mirror in POINTERS_TO_STRUCTURES:
                assert mirror._type_.__name__ == type_name
        else:
            assert mirror is {**PLAIN, **STRUCTURES}[type_name], field


def test_every_structure_of_the_header_is_mirrored() -> None:
    assert set(re.findall(r"struct (\w+) {", HEADER)) == set(STRUCTURES)


@pytest.mark.parametrize("numbers", [abi.Dtype, abi.Encoding, abi.RowFormat, abi.Simulation, abi.Status])
def test_numbers_are_those_of_the_header(numbers: type[IntEnum]) -> None:
    (body,) = re.findall(rf"enum {numbers.__name__} : int32_t {{(.*?)}};", HEADER, re.DOTALL)
    values = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", body)}
    assert values == {each.name: each.value for each in numbers}


def test_a_library_of_another_header_is_refused(tmp_path: Path) -> None:
    class Library:
        """Every function there is, and every structure one byte too large."""

        def __getattr__(self, name: str) -> object:
            if name not in abi.FUNCTIONS:
                raise AttributeError(name)

            def function(*_arguments: object) -> int:
                return 1

            setattr(self, name, function)
            return function

    with pytest.raises(abi.AbiMismatch, match=r"here\.so: StoredTensor has 1 bytes there and 40 here: build it again"):
        abi.declare(Library(), "here.so")  # type: ignore[arg-type]
    libc = ctypes.CDLL(None)
    with pytest.raises(abi.AbiMismatch, match=r"here\.so has no function kernels_sizeof"):
        abi.declare(libc, "here.so")

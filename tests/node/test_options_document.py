"""``docs/options.md`` is made from the declarations: ``python -m tests.node.test_options_document`` writes it anew."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from server.decode.options import DecodeOptions
from server.node.cli import add_options
from server.node.options import BUNDLED_MODEL, NodeOptions
from server.prefill.options import PrefillOptions

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "options.md"


def as_markdown(declared: Iterable[Field[Any]]) -> str:
    """A table of options with their defaults, as the documents have it."""
    lines = ["| option | default | |", "|---|---|---|"]
    for action in add_options(argparse.ArgumentParser(allow_abbrev=False), declared):
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        names = ", ".join(action.option_strings)
        shown = f"`{names} {action.metavar or choices}`" if action.nargs != 0 else f"`{names}`"
        default = "" if action.default in (None, []) or action.default is False else f"`{action.default}`"
        lines.append(f"| {shown} | {default} | {action.help} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def document() -> str:
    common = [field for field in fields(NodeOptions) if field in fields(DecodeOptions)]
    chapters = ["# Options\n", "Written by `python -m tests.node.test_options_document`; a test compares.\n"]
    for title, options in (("Both nodes", NodeOptions), ("Prefill", PrefillOptions), ("Decode", DecodeOptions)):
        own = common if options is NodeOptions else [field for field in fields(options) if field not in common]
        chapters += [f"## {title}\n", as_markdown(own)]
    return "\n".join(chapters).replace(str(BUNDLED_MODEL), str(BUNDLED_MODEL.relative_to(ROOT)))


def test_the_document_has_every_option_as_it_is_declared() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document()


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")

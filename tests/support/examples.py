"""The examples in README.md and docs/, as a reader would take them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny.sums import Sum

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
QUICKSTART_PORT = "30001"
QUESTION = "Question: Tom has 8 bags with 8 books each. How many books does Tom have?\nAnswer:"
RIGHT_ANSWER = " 8 * 8 = 64 #### 64"
"""In a chat it has no space before it."""
SUMS = (Sum(3, "+", 4), Sum(47, "+", 38), Sum(60, "+", 25), Sum(52, "-", 30), Sum(7, "*", 8))
"""What the bundled model can work out and think out."""
CALLS = tuple(each for each in SUMS if each.op != "-")
"""What it leaves to a calculator as it was asked: in a call it often writes ``+`` for ``-``."""
NUMBER = {"type": "number"}
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates a op b.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "op": {"type": "string", "enum": ["+", "-", "*"]}, "b": NUMBER},
            "required": ["a", "op", "b"],
        },
    },
}
"""As the README's program offers it."""
_INLINE = re.compile(r"`((?:\.venv/bin/python )?scripts/[\w./]+ [^`]+|launch_\w+ [^`]+)`")


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(document: Path) -> Iterator[list[str]]:
    """Every command line of the bash blocks, of indented lines and of the text, as words without their comment."""
    text = document.read_text(encoding="utf-8")
    lines = [line for block in blocks(document, "bash") for line in re.split(r"(?<!\\)\n(?!\s)", block)]
    lines += re.findall(r"^ {4}((?:\.venv/bin/|scripts/)\S.*)$", text, re.MULTILINE)
    lines += [" ".join(found.split()) for found in _INLINE.findall(text)]
    for line in lines:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        if words:
            yield words


def curl_of_the_readme(port: object) -> str:
    """The command that asks Tom's question, of the decode node at ``port``."""
    (command,) = [block for block in blocks(README, "bash") if block.startswith("curl ")]
    return command.replace(QUICKSTART_PORT, str(port))


def openai_of_the_readme(port: object) -> str:
    """The Python program that asks it in a chat."""
    (program,) = [block for block in blocks(README, "python") if "Tom has" in block]
    return program.replace(QUICKSTART_PORT, str(port))


def tools_of_the_readme(port: object) -> tuple[str, str]:
    """The Python program that lets the bundled model think and call a tool, and what it prints."""
    (program,) = [block for block in blocks(README, "python") if "tools=" in block]
    (printed,) = [block for block in blocks(README, "text") if "The answer is" in block]
    return program.replace(QUICKSTART_PORT, str(port)), printed


def refusal_of_the_readme() -> str:
    """The answer that the README shows for ``--fault drop:swa:1``, as one line."""
    (shown,) = [block for block in blocks(README, "text") if block.startswith('{"error"')]
    return " ".join(shown.split())

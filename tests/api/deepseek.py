"""Backends whose checkpoint has no template, but the tokens of DeepSeek-V4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from server.chat import deepseek_v4
from server.engine.request import SamplingParams
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import FakeBackend
from tests.support.byte_bpe import write_tokenizer_dir

TOKENS = (deepseek_v4.USER, deepseek_v4.ASSISTANT, deepseek_v4.THINK, deepseek_v4.END_THINK, deepseek_v4.DSML)
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "One operation with two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "op": {"enum": ["+", "-"]}, "b": {"type": "number"}},
            "required": ["a", "op", "b"],
        },
    },
}


def write_deepseek_dir(directory: Path, *, chat_template: str | None = None) -> Path:
    """A tokenizer with tokens of DeepSeek-V4 that are added, not special, as in its checkpoints, and no template."""
    write_tokenizer_dir(directory, chat_template=chat_template)
    path = directory / "tokenizer.json"
    tokenizer = Backend.from_file(str(path))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    tokenizer.save(str(path))
    return directory


def deepseek_backend(directory: Path) -> FakeBackend:
    backend = FakeBackend(Tokenizer.load(write_deepseek_dir(directory)))
    backend.max_context = 4096
    backend.sampling_defaults = SamplingParams(max_tokens=1024)
    return backend

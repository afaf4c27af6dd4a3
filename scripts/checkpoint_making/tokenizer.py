"""The tokenizer that a made checkpoint gets: copied from another one."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from server.model.config import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def fitting_tokenizer(wanted: str | None, default: Path, vocab_size: int) -> Path | None:
    """The directory of the ``wanted`` tokenizer (None: ``default``, if its tokens have rows in the model; ``none``: no
    tokenizer). Raises :class:`CheckpointError` if the wanted one has more tokens than ``vocab_size``.
    """
    if wanted == "none":
        return None
    folder = Path(wanted) if wanted is not None else default
    if not (folder / "tokenizer.json").is_file():
        if wanted is None:
            return None
        raise CheckpointError(f"--tokenizer {folder}: there is no tokenizer.json")
    n_tokens = 1 + max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values())
    if n_tokens <= vocab_size:
        return folder
    if wanted is None:
        return None
    raise CheckpointError(f"--tokenizer {folder} has {n_tokens:,} tokens, vocab_size is {vocab_size:,}")


def copy_files(source: Path, target: Path, names: Iterable[str]) -> list[str]:
    """Copies those of ``names`` that are there; returns them."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found

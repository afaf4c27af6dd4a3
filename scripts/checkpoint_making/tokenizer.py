"""The tokenizer that a made checkpoint gets: copied from another one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from server.model.config import CheckpointError

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def tokenizer_files(folder: Path) -> list[Path]:
    """Those that are there."""
    return [folder / name for name in _FILES if (folder / name).is_file()]


def fitting_tokenizer(wanted: str | None, default: Path, vocab_size: int) -> list[Path]:
    """The files of the ``wanted`` tokenizer (None: of ``default``, if its tokens have rows in the model; ``none``: no
    tokenizer). Raises :class:`CheckpointError` if the wanted one has more tokens than ``vocab_size``.
    """
    if wanted == "none":
        return []
    folder = Path(wanted) if wanted is not None else default
    if not (folder / "tokenizer.json").is_file():
        if wanted is None:
            return []
        raise CheckpointError(f"--tokenizer {folder}: there is no tokenizer.json")
    n_tokens = 1 + max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values())
    if n_tokens <= vocab_size:
        return tokenizer_files(folder)
    if wanted is None:
        return []
    raise CheckpointError(f"--tokenizer {folder} has {n_tokens:,} tokens, vocab_size is {vocab_size:,}")

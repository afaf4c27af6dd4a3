"""The tokenizer of a model directory, as its files say.

The usual directory, a complete ``tokenizer.json`` with a ``tokenizer_config.json`` that adds nothing to it, is read
here. Any other kind is left to ``transformers``, which takes a second to import and knows them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_SETTINGS = {
    *SPECIAL_TOKENS,
    *("tokenizer_class", "backend", "chat_template", "clean_up_tokenization_spaces", "model_max_length"),
    *("add_bos_token", "add_eos_token"),  # without effect where there is a tokenizer.json
}
"""Settings that are read here, or say nothing that this server asks for."""
_NOT_PLAIN_FILES = ("special_tokens_map.json", "added_tokens.json", "tokenizer.model", "additional_chat_templates")
_MAX_PLAIN_VOCAB = 100_000
"""In larger vocabularies transformers looks for a fault that some checkpoints have, and mends it."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files say.

    ``backend`` neither cuts nor pads. ``special_tokens`` are the named ones (``bos_token``), as chat templates see
    them; ``special_ids`` has those and any others. ``clean_up`` is what a decoded text goes through, if anything.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    special_ids: frozenset[int]
    chat_template: str | None
    clean_up: Callable[[str], str] | None = None

    def id_of(self, name: str) -> int | None:
        """Token id of a special token, None if the model has none of this name."""
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def read_tokenizer_files(model_dir: Path) -> TokenizerFiles:
    """Reads the tokenizer of ``model_dir``; nothing is downloaded. What cannot be read raises what the libraries raise.

    :raises FileNotFoundError: the directory has no ``tokenizer.json``.
    :raises TypeError: its tokenizer is of a kind that does not use it.
    """
    if not (model_dir / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{model_dir} has no tokenizer.json: a model directory must carry its tokenizer.")
    return read_plain(model_dir) or read_by_transformers(model_dir)


def read_plain(model_dir: Path) -> TokenizerFiles | None:
    """Reads a directory of the usual kind as :func:`read_by_transformers` would; None if it is of another kind."""
    path = model_dir / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if not isinstance(config, dict) or not _is_plain(config) or any((model_dir / n).exists() for n in _NOT_PLAIN_FILES):
        return None
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    special_tokens = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None}
    special_ids = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    if (
        not special_ids.keys() >= set(special_tokens.values())
        or backend.get_vocab_size() > _MAX_PLAIN_VOCAB
        or backend.truncation is not None
        or backend.padding is not None
    ):
        return None
    if backend.post_processor is None:
        backend.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    template = model_dir / "chat_template.jinja"
    return TokenizerFiles(
        backend=backend,
        special_tokens=special_tokens,
        special_ids=frozenset(special_ids[text] for text in special_tokens.values()),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template"),
    )


def _is_plain(config: dict[str, Any]) -> bool:
    return (
        config.keys() <= _PLAIN_SETTINGS
        and config.get("tokenizer_class") in _PLAIN_CLASSES
        and config.get("backend", "tokenizers") == "tokenizers"
        and not config.get("clean_up_tokenization_spaces")
        and isinstance(config.get("chat_template"), str | None)
        and all(_content(config.get(name)) is not None for name in SPECIAL_TOKENS if config.get(name) is not None)
    )


def _content(token: Any) -> Any:
    """A special token's text: it is written as a string, or as an object with attributes (tokenizer.json's count)."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_by_transformers(model_dir: Path) -> TokenizerFiles:
    """Reads any directory with a tokenizer that transformers knows.

    :raises TypeError: the tokenizer does not use its ``tokenizer.json``.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_log

    transformers_log.disable_default_handler()  # it writes in a format of its own
    transformers_log.enable_propagation()
    hf = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise TypeError(f"{model_dir} has a {type(hf).__name__}, which is not backed by its tokenizer.json.")
    hf.encode("")  # turns off the backend's truncation and padding
    is_bpe = type(hf.backend_tokenizer.model).__name__ == "BPE"  # of which the library cleans up no text, unless forced
    is_forced = hf.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    is_cleaned = hf.clean_up_tokenization_spaces and (is_forced or not is_bpe)
    template = hf.chat_template
    return TokenizerFiles(
        backend=hf.backend_tokenizer,
        special_tokens=hf.special_tokens_map,
        special_ids=frozenset(hf.all_special_ids),
        chat_template=template.get("default") if isinstance(template, dict) else template,
        clean_up=hf.clean_up_tokenization if is_cleaned else None,
    )

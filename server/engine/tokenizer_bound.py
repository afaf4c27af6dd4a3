"""How much text one token can stand for at most, from a tokenizer's own rules: what makes a refusal before tokenizing
sound.
"""

from __future__ import annotations

from typing import Any

_COMPOSED_CHARS = 4
"""No character has a canonical decomposition of more than four: composing shrinks a text to a quarter at most."""
_NORMALIZER_FACTORS = {
    "NFC": _COMPOSED_CHARS,
    "NFKC": _COMPOSED_CHARS,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Characters of the text for one of the normalized text, at most. Others (Strip, ...) may drop any number."""
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength")
_BYTE_LEVEL_ALPHABET = frozenset(
    chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))
)


def chars_per_token(settings: dict[str, Any]) -> int | None:
    """The most characters of a text that one token stands for; None where the rules give no bound.

    ``settings`` is the content of ``tokenizer.json``. A text of more than n times as many characters has more than n
    tokens. There is no bound where a rule can drop text (a normalizer that strips, a pre-tokenizer that splits at
    whitespace), or gives one token for an unknown word of any length.
    """
    added = settings.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    model = settings.get("model") or {}
    pre_tokenizers = _flat(settings.get("pre_tokenizer"), "pretokenizers")
    normalizers = _flat(settings.get("normalizer"), "normalizers")
    is_byte_level = any(part.get("type") == "ByteLevel" for part in (*pre_tokenizers, *normalizers))
    vocab = _pieces(model)
    if not all(map(_keeps_text, pre_tokenizers)) or not _names_every_char(model, vocab, is_byte_level=is_byte_level):
        return None
    factor = 1
    for normalizer in normalizers:
        one = _shrinks_by(normalizer)
        if one is None:
            return None
        factor *= one
    longest = max(map(len, [*vocab, *(token["content"] for token in added)]), default=1)
    return max(1, longest) * factor


def _flat(part: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    """The parts of a pipeline, sequences in sequences opened."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [leaf for child in part.get(children) or [] for leaf in _flat(child, children)]


def _pieces(model: dict[str, Any]) -> set[str]:
    """The texts of the model's own tokens. In those of a byte-level model every character is one byte of the text."""
    vocab = model.get("vocab") or {}
    return set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return kind in _KEEPING_PRE_TOKENIZERS


def _names_every_char(model: dict[str, Any], vocab: set[str], *, is_byte_level: bool) -> bool:
    """Whether every character becomes part of some token that is no longer than the longest of ``vocab``."""
    kind = model.get("type")
    if kind not in ("BPE", "Unigram"):
        return False
    if kind == "BPE" and is_byte_level and vocab >= _BYTE_LEVEL_ALPHABET:
        return True
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return kind == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")


def _shrinks_by(normalizer: dict[str, Any]) -> int | None:
    kind = normalizer.get("type")
    if kind == "Replace":
        old, new = (normalizer.get("pattern") or {}).get("String"), normalizer.get("content")
        return -(-len(old) // len(new)) or 1 if old and new else None
    return _NORMALIZER_FACTORS.get(str(kind))

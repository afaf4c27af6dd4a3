"""The tiny model's tokenizer: bytes, words, numbers, and the fixed pieces of the official chat format."""

import json
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from . import chat_format as official
from .chat_format import BOS, CONTROL_TOKENS, EOS, PAD, TURN_TOKENS
from .words import LARGEST_NUMBER, plain_words, spaced_words

LONGEST_PIECE = 100
JSON_MARKS = (
    '{"',
    '": "',
    '", "',
    '": {"',
    '"}, "',
    '": ["',
    '"], "',
    '"]}}',
    '"]}',
    '"}}',
    '"}',
    '"}}, "',
    '": ',
    ', "',
)
OTHER_TEXT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?(?:#+|[^\s\p{L}\p{N}])|\s+(?!\S)|\s+"
"""How text outside the fixed pieces is cut: as GPT-2 does, but signs one by one."""


def fixed_pieces() -> list[str]:
    """The text of the official format between its tags: each piece is one token, so that a block of tools is short."""
    call = official.call_text("$NAME", {"$KEY": "$VALUE", "$OTHER": 0})
    blocks = [official.TOOLS_HEAD, official.TOOLS_TAIL, official.SCHEMA_HEAD, official.JSON_ONLY, official.EFFORT]
    texts = [*blocks, *call.split("$NAME"), official.result_text("$NAME")]
    tags = "|".join(re.escape(tag) for tag in (*TURN_TOKENS, *CONTROL_TOKENS))
    variable = r"(\$TOOL_NAME2?)|\$(?:NAME|KEY|VALUE|OTHER)|(?<=>)0(?=<)"
    between = (piece for text in texts for piece in re.split(f"{tags}|{variable}", text) if piece)
    pieces = {part for piece in between for part in _cut(piece) if len(part) > 1}
    return sorted({"\n\n", *pieces, *JSON_MARKS}, key=lambda piece: (-len(piece), piece))


def _cut(piece: str) -> list[str]:
    """Parts of at most LONGEST_PIECE bytes; all but the first begin with a space.

    The longest token decides how long a text may be before the server refuses it without counting its tokens.
    """
    parts = [""]
    for word in re.split("(?= )", piece):
        if len((parts[-1] + word).encode()) > LONGEST_PIECE:
            parts.append("")
        parts[-1] += word
    return parts


def _in_bytes(text: str) -> str:
    """`text` in the alphabet of byte-level tokens."""
    [(written, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return written


def _vocabulary() -> list[str]:
    """All token strings by id, none twice: control tokens, tags, the 256 bytes, numbers, words, fixed pieces."""
    numbers = [str(n) for n in range(LARGEST_NUMBER + 1)]
    spaced = [f" {text}" for text in [*numbers, *spaced_words()]]
    texts = [*spaced, *numbers, *plain_words(), "\n\n", *fixed_pieces()]
    tokens = [*CONTROL_TOKENS, *TURN_TOKENS, *sorted(ByteLevel.alphabet()), *(_in_bytes(text) for text in texts)]
    return list(dict.fromkeys(tokens))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: a piece of the vocabulary is one token, any other text falls into bytes.

    `ignore_merges` makes the model look a whole pre-token up first, so no chain of merges is needed.
    """
    vocabulary = {token: index for index, token in enumerate(_vocabulary())}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    pieces = "|".join(re.escape(piece) for piece in fixed_pieces())
    cut = Split(Regex(f"{pieces}|{OTHER_TEXT}"), behavior="isolated")
    core.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = ByteLevelDecoder()
    core.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)])
    core.add_special_tokens(list(CONTROL_TOKENS))
    core.add_tokens(list(TURN_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def meanings(tokenizer: PreTrainedTokenizerFast) -> dict[int, tuple[str, ...]]:
    """The parts of what a token means, by id: the digits of a number, and the word for one with and without a space."""
    found: dict[int, tuple[str, ...]] = {}
    vocabulary = tokenizer.get_vocab()
    for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
        text = token.removeprefix("Ġ")
        if text.isdecimal() and text.isascii():
            found[token_id] = (f"tens {int(text) // 10}", f"ones {int(text) % 10}")
        elif text in vocabulary and f"Ġ{text}" in vocabulary:
            found[token_id] = (text,)
    return found


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`; like the official one it has no chat template."""
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": False}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

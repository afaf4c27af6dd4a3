"""The tiny model's tokenizer: bytes, plus one token for each word and number of the problems."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from .words import LARGEST_NUMBER, NAMES, all_words

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
CONTROL_TOKENS = (BOS, EOS, PAD)
TURN_TOKENS = (USER, ASSISTANT, THINK, END_THINK)

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _vocabulary() -> list[str]:
    """All token strings by id: control tokens, the 256 bytes, numbers and words with their leading space."""
    numbers = [str(n) for n in range(LARGEST_NUMBER + 1)]
    at_line_start = [*NAMES, "The", "Question", "Answer", "How"]
    spaced = [f"Ġ{text}" for text in [*numbers, *all_words()]]
    return [*CONTROL_TOKENS, *TURN_TOKENS, *sorted(ByteLevel.alphabet()), *spaced, *at_line_start]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: a word of the vocabulary is one token, any other text falls into bytes.

    `ignore_merges` makes the model look a whole pre-token up first, so no chain of merges is needed.
    """
    vocabulary = {token: index for index, token in enumerate(_vocabulary())}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
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
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (chat template included) into `folder`."""
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": False}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

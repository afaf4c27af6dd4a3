"""A throw-away byte-level BPE tokenizer directory, so that these tests do not depend on a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<bos>", "<eos>", "<user>", "<assistant>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Tom has 12 apples and buys 30 more.",
    "Question: how many are there now? Answer: 42\n\nStop here. #### 42",
    "Das Gedächtnis für schöne Wörter, déjà vu, naïve Café-Gäste.",
] * 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ '<' + ('assistant' if m.role == 'assistant' else 'user') + '>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if thinking %}think{% endif %}"
)


def write_tokenizer_dir(
    path: Path, *, chat_template: str | None = CHAT_TEMPLATE, generation_config: dict[str, Any] | None = None
) -> Path:
    """Trains 400 ids on three sentences; every text can be encoded, BOS is added to prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path

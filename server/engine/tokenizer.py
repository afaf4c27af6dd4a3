"""Text to token ids and back, the chat template and the sampling defaults, all read from a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from server.engine.chat_template import ChatTemplate
from server.engine.grammar_compiler import GrammarCompiler
from server.engine.request import DEFAULT_MAX_TOKENS, SamplingParams
from server.engine.tokenizer_bound import chars_per_token
from server.engine.tokenizer_files import TokenizerFiles, read_tokenizer_files
from server.engine.tokenizer_process import TokenizerProcess, utf8_of

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""What the fingerprint covers, in this order; files that a directory lacks are left out."""
_WITHOUT_GIL_SIZE = 4096
"""From this many characters or ids on, other threads run meanwhile. For less, taking the GIL back costs too much."""


class Tokenizer:
    """The model directory's own tokenizer.

    ``vocab_size`` counts the ids that have a text (a checkpoint may have more embedding rows). ``fingerprint`` is the
    xxh3_128 of the tokenizer files' names and bytes: equal on two nodes means that text means the same tokens on both.
    ``chars_per_token`` is the most text that one token stands for, in characters (see :mod:`.tokenizer_bound`).
    The methods may be called from any thread.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        fingerprint: str,
        eos_token_ids: frozenset[int],
        sampling_defaults: SamplingParams,
    ) -> None:
        self._backend = files.backend
        self._specials = files.special_ids
        self._clean_up = files.clean_up
        self._chat = ChatTemplate(files.chat_template, files.special_tokens)
        self.vocab_size: int = files.backend.get_vocab_size()
        self.eos_token_ids = eos_token_ids
        self.fingerprint = fingerprint
        self.sampling_defaults = sampling_defaults
        self._settings = self._backend.to_str()
        settings = json.loads(self._settings)
        self.chars_per_token = chars_per_token(settings)
        self.grammars = GrammarCompiler(self._settings, eos_token_ids)
        self._byte_level = _decodes_bytes(settings)
        self._bos = files.id_of("bos_token")
        self._adds_bos = self._bos is not None and self._backend.encode("").ids[:1] == [self._bos]

    @classmethod
    def load(cls, model_dir: str | Path, *, default_max_tokens: int = DEFAULT_MAX_TOKENS) -> Tokenizer:
        """Reads the tokenizer of ``model_dir``; nothing is downloaded. ``default_max_tokens`` counts where its
        generation_config.json has no ``max_new_tokens``.

        What ends an answer is ``eos_token_id`` of generation_config.json, else of config.json, else the tokenizer's
        own ``eos_token``.

        :raises FileNotFoundError: the directory has no ``tokenizer.json``.
        :raises ValueError: an ``eos_token_id`` is no id of the tokenizer.
        """
        model_dir = Path(model_dir)
        files = read_tokenizer_files(model_dir)
        generation_config = _read_json(model_dir / "generation_config.json")
        return cls(
            files,
            fingerprint=tokenizer_fingerprint(model_dir),
            eos_token_ids=_eos_token_ids(model_dir, generation_config, files),
            sampling_defaults=sampling_defaults(generation_config, default_max_tokens),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens (BOS) that the tokenizer's own settings add.

        A text that begins with BOS already, as one from a chat template does, gets no second one.

        :raises RequestFailed: 400 ``invalid_text`` for text that is no valid Unicode (a lone surrogate).
        """
        return self.with_one_bos(self._encode(text, add_special_tokens=True))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what :meth:`render_chat` made: its special tokens are in the text.

        :raises RequestFailed: as :meth:`encode`.
        """
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        utf8_of(text)
        if len(text) < _WITHOUT_GIL_SIZE:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids

    def with_one_bos(self, ids: list[int]) -> list[int]:
        """``ids`` of a text, without the BOS that was added where the text has one itself."""
        return ids[1:] if self._adds_bos and ids[:2] == [self._bos, self._bos] else ids

    def process(self) -> TokenizerProcess:
        """Another process (not started yet) with the same tokenizer, for long texts."""
        return TokenizerProcess(self._settings)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``. Special tokens have no text; bytes that are no UTF-8 become U+FFFD."""
        if len(ids) < _WITHOUT_GIL_SIZE:
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        else:
            text = self._backend.decode_batch([list(ids)], skip_special_tokens=True)[0]
        return text if self._clean_up is None else self._clean_up(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, special tokens by their name (``</s>``), for log probability reports."""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; unlike :meth:`token_text` exact for a part of a character."""
        if self._byte_level and token_id not in self._specials:
            token = self._backend.id_to_token(token_id)
            table = _bytes_of_byte_level_chars()
            if token is not None and all(char in table for char in token):
                return bytes(table[char] for char in token)
        return self.token_text(token_id).encode()

    def token_id(self, text: str) -> int | None:
        """The id of the token that ``text`` is, None if it is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    @property
    def chat_template(self) -> str:
        """The Jinja source of the model directory's chat template; empty if it has none."""
        return self._chat.source

    def template_reads(self, name: str) -> bool:
        """See :meth:`.ChatTemplate.reads`."""
        return self._chat.reads(name)

    def template_knows_role(self, role: str) -> bool:
        """See :meth:`.ChatTemplate.knows_role`."""
        return self._chat.knows_role(role)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, by the model directory's chat template, which sees ``variables``.

        :raises RequestFailed: as :meth:`.ChatTemplate.render`.
        """
        return self._chat.render(
            messages,
            variables,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
        )


def sampling_defaults(
    generation_config: dict[str, Any], default_max_tokens: int = DEFAULT_MAX_TOKENS
) -> SamplingParams:
    """What applies where a request says nothing, from the fields of ``generation_config.json``.

    As in vLLM, ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and ``max_new_tokens`` are
    taken where present, else temperature is 1.0 and nothing is cut off or penalized. Beyond vLLM, an explicit
    ``do_sample: false`` means greedy (temperature 0).
    """
    temperature = generation_config.get("temperature")
    top_p = generation_config.get("top_p")
    top_k = generation_config.get("top_k")
    min_p = generation_config.get("min_p")
    repetition_penalty = generation_config.get("repetition_penalty")
    max_tokens = generation_config.get("max_new_tokens")
    greedy = generation_config.get("do_sample") is False
    return SamplingParams(
        max_tokens=default_max_tokens if max_tokens is None else int(max_tokens),
        temperature=0.0 if greedy else 1.0 if temperature is None else float(temperature),
        top_p=1.0 if greedy or top_p is None else float(top_p),
        top_k=0 if greedy or top_k is None else max(0, int(top_k)),
        min_p=0.0 if greedy or min_p is None else float(min_p),
        repetition_penalty=1.0 if repetition_penalty is None else float(repetition_penalty),
    )


def tokenizer_fingerprint(model_dir: Path) -> str:
    """xxh3_128 (hex) over name, length and bytes of every tokenizer file in ``model_dir``."""
    digest = xxhash.xxh3_128()
    for name in TOKENIZER_FILES:
        path = model_dir / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _eos_token_ids(model_dir: Path, generation_config: dict[str, Any], files: TokenizerFiles) -> frozenset[int]:
    """Of the first file that says one (or a list of them), else of the tokenizer."""
    n_ids = files.backend.get_vocab_size()
    config = _read_json(model_dir / "config.json")
    for name, content in (("generation_config.json", generation_config), ("config.json", config)):
        said = content.get("eos_token_id")
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if wrong := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < n_ids]:
            raise ValueError(f"{name}: eos_token_id is {wrong[0]!r}; allowed is an id below {n_ids}, or a list of them")
        if ids:
            return frozenset(ids)
    own = files.id_of("eos_token")
    return frozenset() if own is None else frozenset({own})


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _decodes_bytes(settings: dict[str, Any]) -> bool:
    decoder = settings.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


@lru_cache(maxsize=1)
def _bytes_of_byte_level_chars() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes are themselves, the others characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table

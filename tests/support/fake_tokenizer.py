"""A tokenizer without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.engine.grammar_compiler import GrammarCompiler
from server.engine.tokenizer_process import EncodingJob, TokenizerProcess

EOS = 0
VOCABULARY = 1000


class FakeTokenizer:
    """One token for each character, no special ones, and a chat is the text of its messages."""

    vocab_size = VOCABULARY
    eos_token_ids = frozenset({EOS})
    chars_per_token: int | None = 1
    grammars = GrammarCompiler("", eos_token_ids)

    def process(self) -> TokenizerProcess:
        return _InThisProcess("")

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCABULARY for c in text]

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def with_one_bos(self, ids: list[int]) -> list[int]:
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return str(token_id).encode()

    chat_template = "{{ messages }}"

    def token_id(self, text: str) -> int | None:
        return None

    def render_chat(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], **options: Any) -> str:
        return "".join(str(message["content"]) for message in messages)

    def template_reads(self, name: str) -> bool:
        return False

    def template_knows_role(self, role: str) -> bool:
        return True


class _InThisProcess(TokenizerProcess):
    def start(self) -> None:
        """There is nothing to start."""

    def encode(self, job: EncodingJob) -> list[list[int]]:
        return [FakeTokenizer().encode(text) for text in job.texts]

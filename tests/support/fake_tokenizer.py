"""A tokenizer without a checkpoint."""

from __future__ import annotations

EOS = 0
VOCABULARY = 1000


class FakeTokenizer:
    """One token for each character. It is its own process."""

    vocab_size = VOCABULARY
    eos_token_ids = frozenset({EOS})
    chars_per_token = 1

    def process(self) -> FakeTokenizer:
        return self

    def start(self) -> None: ...

    def close(self) -> None: ...

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCABULARY for c in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def token_text(self, token_id: int) -> str:
        return str(token_id)

"""What a client may send to change which tokens are likely: OpenAI's names and vLLM's, as both define them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 4096

Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]


class SamplingFields(BaseModel):
    """Penalties, biases and bans. None means: the server's default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for key in biases or ():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"the keys must be token ids, and {key[:40]!r} is none")
        return biases

    @field_validator("bad_words")
    @classmethod
    def _check_words(cls, words: list[str] | None) -> list[str] | None:
        for word in words or ():
            if not word.strip():
                raise ValueError("a word must have more than white space")
        return words

    @property
    def named_token_ids(self) -> dict[str, list[int]]:
        """The token ids that the request names, by their field."""
        biased = [int(key) for key in self.logit_bias or ()]
        return {"logit_bias": biased, "allowed_token_ids": self.allowed_token_ids or []}

    def asked_edits(self) -> dict[str, Any]:
        """What the request says, by the names of ``SamplingParams``; None where it says nothing."""
        biases, allowed = self.logit_bias, self.allowed_token_ids
        return {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_p": self.min_p,
            "logit_bias": None if biases is None else tuple((int(key), float(bias)) for key, bias in biases.items()),
            "allowed_token_ids": None if allowed is None else tuple(allowed),
        }

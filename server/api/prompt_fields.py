"""Fields of a request that ask for its prompt's own log probabilities."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.engine.request import MAX_LOGPROBS


class PromptFields(BaseModel):
    """vLLM's field; text completions have ``echo`` with ``logprobs`` beside it."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def n_prompt_logprobs(self) -> int | None:
        """How many alternatives are wanted beside the log probability of each of the prompt's tokens; None for no log
        probabilities of them.
        """
        return self.prompt_logprobs

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has something even if nothing is generated."""
        return self.prompt_logprobs is not None

    @property
    def prompt_logprobs_field(self) -> str:
        """The name of the field that asks for them."""
        return "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"

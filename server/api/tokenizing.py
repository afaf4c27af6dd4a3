"""From a request's prompts to token ids and back: bounded before anything is read, and off the event loop if long.

Short texts are read at once, longer ones in a lane with a thread, long ones in a lane with a process, which is killed
when nobody waits for its work any more. So a long text delays no shorter one, and nothing here is shared with what
commits, fences or probes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from server.api.errors import InvalidRequest
from server.api.lanes import Lane, Lanes
from server.api.request_id import current_request
from server.api.schemas import Prompt
from server.chat.formats import Prompt as ChatPrompt
from server.engine.grammar import Grammar
from server.engine.request import Backend
from server.engine.tokenizer_process import EncodingJob
from server.failure import RequestFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_CHARS = 4096
"""Up to this many characters, of all prompts of a request, are read in the event loop: one or two milliseconds."""
INLINE_IDS = 4096
"""The same for token ids, to look at or to decode."""
THREAD_CHARS = 1 << 16
"""Up to this many are read in a thread, which cannot be ended: a twentieth of a second."""
UNBOUNDED_CHARS_PER_TOKEN = 64
"""What is taken for each token of the context where the tokenizer's own rules give no bound."""


class PromptReader:
    """Tokenizes, renders and decodes for one HTTP app."""

    def __init__(self, backend: Backend, lanes: Lanes) -> None:
        self._backend = backend
        self._tokenizer = backend.tokenizer
        self._lanes = lanes
        self._process = self._tokenizer.process()

    async def start(self) -> None:
        """Starts the process for long texts now. If that fails, it is logged, and the first long text tries again."""
        try:
            await self._lanes.long_texts.run(0, self._process.start)
        except RequestFailed as failure:
            log.warning("long prompts cannot be tokenized yet: %s", failure)

    def close(self) -> None:
        """Ends the process. Its caller should have ended every request before."""
        self._process.close()

    async def read(self, prompts: Sequence[Prompt], field: str, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each prompt. ``field`` is the request's, for errors. With ``add_special_tokens`` texts get those
        that the tokenizer's own settings add.

        :raises InvalidRequest: 400, a prompt that cannot fit the context, by its length alone, or a wrong token id.
        :raises RequestFailed: 400 for text that is no Unicode; 503 or 504 as :meth:`.Lane.run`.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        given = [prompt for prompt in prompts if not isinstance(prompt, str)]
        for text in texts:
            self._check_text_length(text, field)
        for ids in given:
            check_prompt_length(len(ids), self._backend.max_context, field)
        encoded = iter(await self._encode(texts, is_rendered=not add_special_tokens)) if texts else iter(())
        if given:
            await self._run_by_ids(sum(map(len, given)), partial(self._check_ids, given, field))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def read_chat(self, prepare: Callable[[], ChatPrompt], body_nbytes: int) -> tuple[ChatPrompt, list[int]]:
        """A conversation's prompt, which ``prepare`` makes, and its token ids. ``body_nbytes`` is the size of the
        request, which bounds what a chat format sees.

        :raises RequestFailed: as :meth:`read`, and what the chat format refuses.
        """
        prompt = await self._run(body_nbytes, INLINE_CHARS, self._lanes.templates, prepare)
        self._check_text_length(prompt.text, "messages")
        [ids] = await self._encode([prompt.text], is_rendered=True)
        return prompt, ids

    async def read_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of words that an answer must not have: each as at the beginning of a text and, as in vLLM, behind a
        space, where that only makes its first token another one.

        :raises RequestFailed: as :meth:`read`.
        """
        if not words:
            return ()
        return await self._run(
            2 * sum(map(len, words)),
            INLINE_CHARS,
            self._lanes.texts,
            lambda: tuple(ids for word in words for ids in self._spellings(word.lstrip())),
        )

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        plain, behind_space = (tuple(self._tokenizer.encode_rendered(text)) for text in (word, f" {word}"))
        is_other = behind_space[:1] != plain[:1] and len(behind_space) == len(plain)
        return [ids for ids in ((plain, behind_space) if is_other else (plain,)) if ids]

    async def make_grammar(self, function: Callable[[], Grammar | None]) -> Grammar | None:
        """The grammar that ``function`` makes of a request, off the event loop.

        :raises RequestFailed: as ``function`` and :meth:`.Lane.run`.
        """
        return await self._lanes.grammar_texts.run(0, function)

    async def compile(self, grammar: Grammar, field: str) -> None:
        """Makes ``grammar`` ready for its answers, at once if it is. ``field`` is the request's, for errors.

        :raises RequestFailed: 400 ``invalid_grammar``; 503 or 504 as :meth:`.Lane.run`.
        """
        grammars, request = self._tokenizer.grammars, current_request()
        if grammars.is_ready(grammar):
            return
        client = "" if request is None else request.client
        try:
            await self._lanes.grammars.run(len(grammar.text), partial(grammars.compile, grammar), client=client)
        except RequestFailed as failure:
            failure.param = field
            raise

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token ids that :meth:`read` has checked."""
        return await self._run_by_ids(sum(map(len, prompts)), lambda: [self._tokenizer.decode(ids) for ids in prompts])

    async def text_of(self, ids: Sequence[int], field: str) -> str:
        """Text of token ids whose number the caller has bounded. ``field`` is the request's, for errors.

        :raises InvalidRequest: 400, a wrong token id.
        """

        def check_and_decode() -> str:
            self._check_ids([ids], field)
            return self._tokenizer.decode(ids)

        return await self._run_by_ids(len(ids), check_and_decode)

    async def map_ids(self, ids: Sequence[int], function: Callable[[int], T]) -> list[T]:
        """``function`` of each of ``ids``, off the event loop if there are many."""
        return await self._run_by_ids(len(ids), lambda: [function(token_id) for token_id in ids])

    async def _encode(self, texts: Sequence[str], *, is_rendered: bool = False) -> list[list[int]]:
        n_chars = sum(map(len, texts))
        if n_chars > THREAD_CHARS:
            job = EncodingJob(texts, add_special_tokens=not is_rendered)
            ids = await self._lanes.long_texts.run(
                n_chars, partial(self._process.encode, job), lambda: self._process.cancel(job)
            )
            return ids if is_rendered else [self._tokenizer.with_one_bos(one) for one in ids]
        encode = self._tokenizer.encode_rendered if is_rendered else self._tokenizer.encode
        return await self._run(n_chars, INLINE_CHARS, self._lanes.texts, lambda: [encode(text) for text in texts])

    async def _run_by_ids(self, n_ids: int, function: Callable[[], T]) -> T:
        return await self._run(n_ids, INLINE_IDS, self._lanes.texts, function)

    @staticmethod
    async def _run(size: int, inline_size: int, lane: Lane, function: Callable[[], T]) -> T:
        return function() if size <= inline_size else await lane.run(size, function)

    def _check_text_length(self, text: str, field: str) -> None:
        """Refuses what cannot fit whatever its tokens are: one takes in at most so many characters."""
        max_context, per_token = self._backend.max_context, self._tokenizer.chars_per_token
        if len(text) <= (max_context - 1) * (per_token or UNBOUNDED_CHARS_PER_TOKEN):
            return
        what = (
            f"and one token has at most {per_token}: it is more than"
            if per_token is not None
            else f"and at most {UNBOUNDED_CHARS_PER_TOKEN} are taken for each token of"
        )
        raise InvalidRequest(
            field,
            f"The prompt has {len(text)} characters, {what} the context of {max_context} tokens including at least one "
            "generated token.",
            code="context_length_exceeded",
        )

    def _check_ids(self, prompts: Sequence[Sequence[int]], field: str) -> None:
        """Refuses what is not an id of the vocabulary. Looks at every id at the speed of C."""
        vocab_size = self._tokenizer.vocab_size
        for which, ids in enumerate(prompts):
            if set(map(type, ids)) != {int}:
                position = next(i for i, token_id in enumerate(ids) if type(token_id) is not int)
                raise InvalidRequest(
                    field, f"{field}: element {position} of prompt {which} is not an integer token id."
                )
            check_token_id(min(ids), vocab_size, field)
            check_token_id(max(ids), vocab_size, field)


def check_token_id(token_id: int, vocab_size: int, field: str) -> None:
    """:raises InvalidRequest: names an id that the vocabulary does not have."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(field, f"{field}: token id {token_id} is not in the vocabulary (0 to {vocab_size - 1}).")


def check_prompt_length(n_tokens: int, max_context: int, field: str) -> None:
    """:raises InvalidRequest: the prompt leaves no place for a token of the answer."""
    if n_tokens >= max_context:
        raise InvalidRequest(
            field,
            f"The prompt has {n_tokens} tokens, but the context is {max_context} tokens including at least one "
            "generated token.",
            code="context_length_exceeded",
        )

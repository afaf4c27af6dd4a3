"""``POST /generate``: SGLang's own route, which routers, benchmarks and its clients use."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from server.api.answers import Answer, Writer, finite, n_logprobs, token_key
from server.api.chunks import DONE, event, pd_object
from server.api.errors import failure_body
from server.api.fields import ignored_header
from server.api.generate_fields import GenerateRequest
from server.api.generations import Generations
from server.api.prompt_logprobs import n_entries, sglang_arrays
from server.api.request_id import request_id
from server.api.requests import check_request, serve
from server.api.rules import read_rules
from server.api.streaming import WHOLE_OR_STREAMED, until_disconnect
from server.api.tokenizing import PromptReader
from server.engine.request import Backend, FinishReason, SamplingParams, TokenLogprob, TokenOutput
from server.failure import RequestFailed

FREE_NBYTES = 1 << 16
"""Each chunk of a stream repeats all before it. Up to this size, about, one is sent for every output."""
REPEATED_PARTS = 16
"""Beyond it one is sent when this part of it is new: so a stream is at most about this many times its answer."""
_LOGPROB_NBYTES = 30
_ID_NBYTES = 7


def generate_router(backend: Backend, reader: PromptReader, route_class: type[APIRoute]) -> APIRouter:
    """``route_class`` bounds the body; see :func:`~server.api.bodies.bounded_route`."""
    router = APIRouter(route_class=route_class)

    @router.post("/generate", response_model=None, responses=WHOLE_OR_STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continues each prompt; a list of answers where there are several. Streamed chunks hold all so far."""
        fields = body.generation_fields()
        rooms = check_request(backend, fields, len(body.prompts))
        rules = await until_disconnect(request.receive, read_rules(reader, fields))
        prompts = await until_disconnect(request.receive, reader.read(body.prompts, body.prompt_field))
        writer = GenerateWriter(backend, prompts, body)
        response = await serve(
            request,
            backend,
            fields,
            prompts,
            rooms,
            writer,
            rules,
            prompt_field=body.prompt_field,
            make_chunks=writer.chunks,
        )
        response.headers.update(ignored_header(body.ignored))
        return response

    return router


class GenerateWriter(Writer):
    """Answers with ``text``, ``output_ids`` and ``meta_info``."""

    id_prefix = "gen-"
    object_name = chunk_object_name = "generate"

    def __init__(self, backend: Backend, prompts: Sequence[Sequence[int]], body: GenerateRequest) -> None:
        super().__init__(backend, prompts)
        if isinstance(body.rid, str):
            self.id = body.rid
        self._body = body
        self._prompts = [ids for ids in prompts for _ in range(body.sampling_params.n_samples)]
        self._began = time.monotonic()

    def whole(self, answers: Sequence[Answer], pd: Mapping[str, str]) -> Any:
        """One object, or a list of them. The first has ``pd``."""
        spelled = [self.choice(index, answer) for index, answer in enumerate(answers)]
        spelled[0]["meta_info"]["pd"] = pd
        return spelled if self._body.is_many else spelled[0]

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "text": answer.text,
            "output_ids": answer.token_ids,
            "meta_info": self._meta_info(index, answer),
        }

    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        raise NotImplementedError  # a chunk has no choices: see GenerateChunks

    def chunks(self, generations: Generations) -> GenerateChunks:
        """The chunks of a stream of ``generations``."""
        return GenerateChunks(self, generations, numbered=self._body.is_many)

    def _meta_info(self, index: int, answer: Answer) -> dict[str, Any]:
        info: dict[str, Any] = {
            "id": self._body.rid_of(index) or (f"{self.id}-{index}" if self._body.is_many else self.id),
            "finish_reason": _finish_reason(answer),
            "prompt_tokens": len(self._prompts[index]),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": answer.cached_tokens,
        }
        if answer.finish_reason is not None:
            info["e2e_latency"] = time.monotonic() - self._began
        if self._body.return_logprob:
            info |= self._input_logprobs(index, answer)
            info["output_token_logprobs"] = [self._logprob(e.token_id, e.logprob) for e in answer.logprobs]
            if self._body.top_logprobs_num:
                info["output_top_logprobs"] = [self._top(entry) for entry in answer.logprobs]
        return info

    def _input_logprobs(self, index: int, answer: Answer) -> dict[str, Any]:
        """Those of the prompt's tokens. They are handed over to the decode node, whose answer has them; a prefill
        node's has none, since routers put those before the decode node's.
        """
        if answer.prompt_logprobs is None:
            return {"input_token_logprobs": []}
        return sglang_arrays(
            self._tokenizer,
            self._prompts[index],
            answer.prompt_logprobs,
            n_top=self._body.top_logprobs_num or 0,
            start=self._body.logprob_start_len or 0,
            with_text=bool(self._body.return_text_in_logprobs),
        )

    def _top(self, entry: TokenLogprob) -> list[Any]:
        return [self._logprob(token_id, logprob) for token_id, logprob in entry.top]

    def _logprob(self, token_id: int, logprob: float) -> list[Any]:
        text = token_key(self._tokenizer, token_id) if self._body.return_text_in_logprobs else None
        return [finite(logprob), token_id, text]


def _finish_reason(answer: Answer) -> dict[str, Any] | None:
    """Also what has matched: a stop string, or the id of the token that ended the answer."""
    match answer.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(answer.token_ids)}
        case FinishReason.STOP:
            last_id = answer.token_ids[-1] if answer.token_ids else None
            return {"type": "stop", "matched": last_id if answer.stop_reason is None else answer.stop_reason}
    return {"type": str(answer.finish_reason)}


class GenerateChunks:
    """The events of one stream. Each holds the whole answer so far; with several generations also its ``index``.

    So that long answers do not cost the square of their length, an output may be left to the next chunk.
    """

    def __init__(self, writer: GenerateWriter, generations: Generations, *, numbered: bool) -> None:
        self._writer, self._generations, self._numbered = writer, generations, numbered
        self._answers = [Answer() for _ in range(len(generations))]
        self._nbytes = [0] * len(generations)
        self._sent_nbytes = [0] * len(generations)
        self._n_open = len(generations)
        self._request_id = request_id()

    def events(self, index: int, output: TokenOutput) -> list[bytes]:
        """The event for an output of generation ``index``; none if it is left to the next."""
        answer = self._answers[index]
        answer.add(output)
        answer.cached_tokens = self._generations.cached_tokens_of(index)
        self._writer.usage.add(output)
        self._nbytes[index] += _nbytes(output)
        is_over = output.finish_reason is not None
        self._n_open -= is_over
        if not is_over and not self._is_due(index, self._nbytes[index]):
            return []
        self._sent_nbytes[index] = self._nbytes[index]
        spelled = self._writer.choice(index, answer)
        if self._numbered:
            spelled["index"] = index
        if not self._n_open:
            spelled["meta_info"]["pd"] = pd_object(self._request_id, self._generations.route_headers)
        return [event(spelled)]

    def end(self) -> list[bytes]:
        """What comes behind the last output."""
        return [DONE]

    def failed(self, failure: RequestFailed) -> list[bytes]:
        """An event with the error's body."""
        return [event(failure_body(failure))]

    def may_be_long(self, sampling: SamplingParams) -> bool:
        return sampling.logprobs is not None or sampling.prompt_logprobs is not None

    def size(self, index: int, output: TokenOutput) -> int:
        if output.finish_reason is None and not self._is_due(index, self._nbytes[index] + _nbytes(output)):
            return 0
        answer = self._answers[index]
        return n_entries([answer.prompt_logprobs, output.prompt_logprobs]) + sum(
            n_logprobs(entries) for entries in (answer.logprobs, output.logprobs)
        )

    def _is_due(self, index: int, nbytes: int) -> bool:
        sent = self._sent_nbytes[index]
        return nbytes <= FREE_NBYTES or (nbytes - sent) * REPEATED_PARTS >= nbytes


def _nbytes(output: TokenOutput) -> int:
    """About what ``output`` adds to every later chunk."""
    n_logprobs = sum(1 + len(entry.top) for entry in output.logprobs)
    return len(output.text) + _ID_NBYTES * len(output.token_ids) + _LOGPROB_NBYTES * n_logprobs

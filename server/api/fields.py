"""Every field of the three request schemas that clients write for, and what becomes of it here.

The schemas are OpenAI's (``openai`` 3.57.0), vLLM's (its main branch of October 2026) and SGLang's (0.5.23), for text
and chat completions, and OpenAI's for responses. Each of their fields is one of three:

- *honoured*: a field of the request models in :mod:`server.api.schemas` and :mod:`server.api.responses_fields`;
- *harmless*, in :data:`HARMLESS`: it changes nothing in the answer, whatever its value;
- *refused*, in :data:`REFUSED`: with any value but those that change nothing.

A field in none of them is ignored, and the answer says so in the header ``x-ignored-fields``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from server.api.errors import InvalidRequest

IGNORED_HEADER = "x-ignored-fields"
MAX_IGNORED_CHARS = 256
_MAX_NAME_CHARS = 64
_MAX_IGNORED_NAMES = 32
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.\-]")

Harmless = Callable[[Any], bool]
"""Whether a value changes nothing."""


def _nothing(value: Any) -> bool:
    """Absent, off or an empty list or text. Zero is a value, and so is an empty object: some turn something on."""
    return value is None or value is False or value in ("", [])


def _or(*values: Any) -> Harmless:
    """Nothing, or one of ``values``, of the same type: ``1`` is not ``True``."""
    return lambda value: _nothing(value) or any(type(value) is type(v) and value == v for v in values)


def _only(*values: Any) -> Harmless:
    """None or one of ``values``; ``False`` and empty values are no such value."""
    return lambda value: value is None or any(type(value) is type(v) and value == v for v in values)


_EMPTY = _or({})
_ZERO = _or(0, 0.0)
_ONE = _only(1, 1.0)

HARMLESS = frozenset(
    {
        # names and bookkeeping of the client, the router or the accounting
        *("metadata", "store", "user", "safety_identifier", "service_tier", "custom_labels"),
        *("request_id", "rid", "session_id"),
        # which worker, when, how long in a cache: there is one, first come first served, and what is kept of prompts
        # is kept as long as there is room, for whoever has the same salt
        *("priority", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        # faster or in other pieces, but the same text
        *("prediction", "stream_interval"),
        # settings of images, audio and video, whose contents are refused by themselves
        *("media_io_kwargs", "mm_processor_kwargs", "images_config", "video_config"),
        *("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "return_mm_kwargs"),
        # details of something that is refused by itself
        *("parallel_tool_calls", "truncation_side", "routed_experts_start_len", "routed_experts_prompt_start"),
        *("return_flat_raw_top_logprobs_b64", "guided_decoding_backend"),
        # how reasoning is shown, which only chat completions tell from the rest: there they are honoured
        *("separate_reasoning", "stream_reasoning"),
    }
)
"""Fields that change nothing in the answer of this server."""

_REFUSED_UNLESS_NOTHING = (
    # sampling
    *("use_beam_search", "custom_logit_processor", "watermark", "watermarking", "lora_path"),
    # what the prompt is
    *("suffix", "prompt_embeds", "input_ids", "truncate_prompt_tokens", "session_params"),
    # where the answer ends
    *("stop_regex", "repetition_detection"),
    # constrained decoding and tools
    *("guided_whitespace_pattern", "functions", "web_search_options"),
    # how the answer is spelled
    *("audio", "include_stop_str_in_output", "no_stop_trim"),
    # more than the text
    *("moderation", "logprob_token_ids", "sampling_logprobs_mode"),
    *("return_tokens_as_token_ids", "return_token_ids", "return_prompt_token_ids", "return_token_offsets"),
    *("return_prompt_text", "return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
    *("return_spec_tokens_details", "return_meta_info", "return_input_ids_in_sglext"),
    *("return_output_ids_in_sglext", "return_sampling_mask", "return_flat_raw_output_top_logprobs"),
)

REFUSED: Mapping[str, Harmless] = {
    **dict.fromkeys(_REFUSED_UNLESS_NOTHING, _nothing),
    "min_new_tokens": _ZERO,
    "length_penalty": _ONE,
    **dict.fromkeys(("custom_params", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"), _EMPTY),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), _only(True)),
    "function_call": _or("none", "auto"),
    "thinking_token_budget": _or(-1),
    "modalities": _or(["text"]),
    "verbosity": _or("medium"),
}
"""Fields of both routes that would change the answer and are not built, each with the values that change nothing."""

REFUSED_IN_COMPLETIONS: Mapping[str, Harmless] = {
    **REFUSED,
    "add_special_tokens": _only(True),
    "tools": _nothing,
    "include_reasoning": _only(True),
    "tool_choice": _or("none", "auto"),
}
REFUSED_IN_CHAT: Mapping[str, Harmless] = {
    **REFUSED,
    "add_special_tokens": _nothing,
    "echo": _nothing,
    "best_of": _or(1),
    "chat_template": _nothing,
    "documents": _nothing,
    "task": _nothing,
}
"""The chat format of the checkpoint spells the conversation, and reads no documents."""

REFUSED_IN_RESPONSES: Mapping[str, Harmless] = {
    **REFUSED_IN_CHAT,
    # nothing is kept: there is no earlier response, no conversation, and nothing to ask for later
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "background", "background_options"), _nothing),
    **dict.fromkeys(("context_management", "access_programs"), _EMPTY),
    "truncation": _or("disabled"),
    # one answer, without log probabilities
    "n": _or(1),
    "top_logprobs": _ZERO,
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _nothing),
    # chat's names: here they are input, text.format, reasoning.effort and max_output_tokens
    **dict.fromkeys(("messages", "response_format", "reasoning_effort"), _nothing),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), _nothing),
    # what chat has of its own beside OpenAI's fields
    **dict.fromkeys(("thinking", "continue_final_message"), _nothing),
    **dict.fromkeys(("include_reasoning", "add_generation_prompt"), _only(True)),
    "chat_template_kwargs": _EMPTY,
}
"""Of ``POST /v1/responses``."""
HARMLESS_IN_RESPONSES = frozenset({"image", "max_tool_calls"})
"""They are about images and about tools of the server's own, which are refused by themselves."""
REFUSED_IN_REASONING: Mapping[str, Harmless] = {"context": _or("auto"), "mode": _or("standard")}
REFUSED_IN_TEXT: Mapping[str, Harmless] = {"verbosity": REFUSED["verbosity"]}

REFUSED_IN_SAMPLING_PARAMS: Mapping[str, Harmless] = {
    **{name: harmless for name, harmless in REFUSED.items() if name != "min_new_tokens"},
    "structural_tag": _nothing,
    # The names of other routes: SGLang's differ, or the field belongs outside of sampling_params.
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "seed"), _nothing),
    **dict.fromkeys(("model", "stream", "stream_options", "user", "prompt_logprobs"), _nothing),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), _nothing),
    **dict.fromkeys(("cache_salt", "extra_key"), _only()),
}
REFUSED_IN_GENERATE: Mapping[str, Harmless] = {
    **dict.fromkeys(("input_embeds", "image_data", "video_data", "audio_data", "modalities"), _nothing),
    **dict.fromkeys(("lora_path", "lora_id", "session_params", "custom_logit_processor"), _nothing),
    **dict.fromkeys(("token_ids_logprob", "return_hidden_states", "return_routed_experts"), _nothing),
    **dict.fromkeys(("return_bytes", "return_entropy", "require_reasoning"), _nothing),
}
"""Of ``POST /generate``, in and beside its ``sampling_params``."""
HARMLESS_IN_GENERATE = frozenset(
    {
        "model",  # no field of SGLang's; smg says "unknown" there if its client named none
        *("log_metrics", "no_logs", "background", "conversation_id", "bootstrap_pair_key", "decode_tp_size"),
    }
)


def refuse_unsupported(body: Mapping[str, Any], refused: Mapping[str, Harmless], prefix: str = "") -> None:
    """``prefix`` stands before each name.

    :raises InvalidRequest: ``body`` has a field of ``refused`` with a value that would change the answer.
    """
    for name in sorted(refused.keys() & body.keys()):
        if not refused[name](body[name]):
            message = f"{prefix}{name} is not supported by this server: leave it out."
            raise InvalidRequest(prefix + name, message, code="unsupported")


def ignored_fields(body: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> list[str]:
    """The first few names in ``body`` that are neither ``known`` nor harmless, with ``prefix`` before each."""
    names = (name for name in body if name not in known and name not in HARMLESS)
    return [prefix + name[:_MAX_NAME_CHARS] for name in islice(names, _MAX_IGNORED_NAMES)]


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields, at most :data:`MAX_IGNORED_CHARS` long; none where there are none."""
    value = ",".join(_NOT_IN_A_NAME.sub("?", name) for name in names)
    if len(value) > MAX_IGNORED_CHARS:
        value = value[: MAX_IGNORED_CHARS - 3].rpartition(",")[0] + "..."
    return {IGNORED_HEADER: value} if value else {}

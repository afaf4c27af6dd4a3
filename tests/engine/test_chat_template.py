"""What a chat template renders is what transformers renders, without importing it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.engine.chat_template import CALL_ARGUMENTS, ChatTemplate
from server.failure import RequestFailed
from server.node.options import BUNDLED_MODEL
from tests.support.byte_bpe import CHAT_TEMPLATE

TURNS = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {{- '<｜User｜>' + message['content'] -}}
    {%- if loop.last or messages[loop.index0 + 1]['role'] == 'assistant' -%}
      {{- '<｜Assistant｜></think>' -}}
    {%- endif -%}
  {%- elif message['role'] == 'assistant' -%}
    {{- message['content'] + eos_token -}}
  {%- elif message['role'] == 'system' -%}
    {{- message['content'] -}}
  {%- else -%}
    {{- raise_exception('messages have the role system, user or assistant, not ' + message['role'][:60]) -}}
  {%- endif -%}
{%- endfor -%}
"""
USER = {"role": "user", "content": "Tom has <12> & 'more'\n"}
ANSWER = {"role": "assistant", "content": " so\u00e4 ", "name": None, "reasoning": "because"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER],
    [
        USER,
        {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": [{"id": 1, "f": {"x": [1.5, True]}}]},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
    [],
]
TEMPLATES = {
    "turns": TURNS,
    "byte bpe": CHAT_TEMPLATE,
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true) }}",
    "json of variables": "{{ extra | tojson(ensure_ascii=true, separators=(',', ':')) }}{{ thinking }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}\n{% endfor %}",
    "null fields": "{% for m in messages %}{{ m.items() | list }}{{ 'name' in m }}{{ m.content }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}\n{% endfor %}{{ x }}",
    "whitespace": "  {% for m in messages %}\n   {{ m.role }}\n   {% endfor %}\n  {# a comment #}\nend",
    "namespace": "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    "hidden namespace": "{% set n = namespace(_a=1) %}{{ n._a }}",
    "hidden attribute": "{% set n = namespace() %}{% set n.__class__ = 1 %}x",
    "dict": "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['a']) }}",
    "sandbox": "{{ messages.__class__.__mro__ }}{{ ''.format.__globals__ }}",
    "changes messages": "{{ messages.append(1) }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}",
    "call": "{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ tools is none }}",
    "raises": "{{ raise_exception('no: ' + messages[0].role) }}",
    "not a template": "{% for %}",
    "unknown filter": "{{ messages | nothing }}",
    "year": "{{ strftime_now('%Y') }}",
}


def expected(template: str, messages: list[dict[str, Any]], variables: dict[str, Any], prompt: bool) -> str | None:
    """What transformers renders; None if it refuses."""
    try:
        return str(
            HF.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=prompt, tokenize=False, **variables
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


def rendered(template: str, messages: list[dict[str, Any]], variables: dict[str, Any], prompt: bool) -> str | None:
    try:
        return ChatTemplate(template, HF.special_tokens_map).render(messages, variables, add_generation_prompt=prompt)
    except RequestFailed as failure:
        return None if failure.code == "chat_template_error" else str(failure)


HF = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
VARIABLES: list[dict[str, Any]] = [{}, {"thinking": True, "extra": {"b": [1, None, "\u00e4<"], "a": 2.0}}]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_what_transformers_renders(template: str) -> None:
    for messages in CONVERSATIONS:
        for variables in VARIABLES:
            for prompt in (False, True):
                case = (template, messages, variables, prompt)
                assert rendered(*case) == expected(*case), case


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["role", "content", "name", "reasoning", "thinking", "reasoning_content", "tool_calls"])


@given(st.lists(st.dictionaries(FIELDS, JSON, max_size=4), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_messages_reach_the_template_as_with_transformers(messages: list[dict[str, Any]]) -> None:
    for name in ("json", "null fields", "turns"):
        assert rendered(TEMPLATES[name], messages, {}, True) == expected(TEMPLATES[name], messages, {}, True)


def test_the_reserved_names_are_the_arguments_of_the_call_and_what_templates_get() -> None:
    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.values()
    names = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert names | {"messages", "conversations", "raise_exception", "strftime_now", "tojson"} == CALL_ARGUMENTS


def test_a_special_token_may_not_be_set_by_a_client(tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match="bos_token") as failure:
        ChatTemplate("x", {"bos_token": "<s>"}).render([USER], {"bos_token": "y"}, add_generation_prompt=True)
    assert failure.value.code == "invalid_chat_template_kwargs"

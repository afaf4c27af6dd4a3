"""Which chat format and parsers a checkpoint gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.chat.registry import (
    CHAT_FORMATS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ChatFormatMissing,
    ChatSettings,
    chat_format,
)
from server.engine.tokenizer import Tokenizer
from server.node.options import BUNDLED_MODEL, NodeOptions
from tests.api.deepseek import write_deepseek_dir
from tests.support.byte_bpe import write_tokenizer_dir


@pytest.mark.parametrize(
    ("template", "tools", "reasons"),
    [
        ("{{ messages }}", None, False),
        ("{{ messages }}<tool_call>", "hermes", False),
        ("{{ messages }}｜DSML｜ </think>", "deepseek_v4", True),
    ],
)
def test_a_template_chooses_its_parsers(tmp_path: Path, template: str, tools: str | None, reasons: bool) -> None:
    chat = chat_format(Tokenizer.load(write_tokenizer_dir(tmp_path, chat_template=template)))
    assert (chat.name, chat.tools and chat.tools.name, chat.reasoning is not None) == ("template", tools, reasons)


def test_the_tokens_of_deepseek_choose_its_format_where_there_is_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_deepseek_dir(tmp_path))
    chat = chat_format(tokenizer)
    assert (chat.name, chat.tools and chat.tools.name, chat.reasoning is not None) == (
        "deepseek_v4",
        "deepseek_v4",
        True,
    )
    chat = chat_format(tokenizer, ChatSettings(tool_parser="none", reasoning_parser="none"))
    assert (chat.name, chat.tools, chat.reasoning) == ("deepseek_v4", None, None)
    assert chat_format(tokenizer, ChatSettings(tool_parser="hermes")).tools is TOOL_PARSERS["hermes"]
    with pytest.raises(ChatFormatMissing, match="no chat template"):
        chat_format(tokenizer, ChatSettings("template"))


@pytest.mark.parametrize(
    ("template", "can_think", "says"),
    [
        ("{{ messages }}", False, "format template, no tool parser, no reasoning parser"),
        ("{{ messages }}</think>", False, "format template, no tool parser, cannot be asked to think"),
        ("{{ messages }}{{ thinking }}", False, "format template, no tool parser, no reasoning parser"),
        ("{{ messages }}{{ thinking }}</think>", True, "format template, no tool parser, thinks if asked to"),
    ],
)
def test_what_a_format_says_of_itself(tmp_path: Path, template: str, can_think: bool, says: str) -> None:
    chat = chat_format(Tokenizer.load(write_tokenizer_dir(tmp_path, chat_template=template)))
    assert (chat.can_think, str(chat)) == (can_think, says)


def test_other_tokens_cannot_spell_its_format(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer_dir(tmp_path, chat_template=None))
    assert chat_format(tokenizer).name == "template"  # and every chat is refused
    with pytest.raises(ChatFormatMissing, match="tokens"):
        chat_format(tokenizer, ChatSettings("deepseek_v4"))


def test_a_template_can_be_left_aside(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_deepseek_dir(tmp_path, chat_template="{{ messages }}"))
    assert chat_format(tokenizer).name == "template"
    assert chat_format(tokenizer, ChatSettings("deepseek_v4")).name == "deepseek_v4"


def test_the_bundled_checkpoint_thinks_and_calls() -> None:
    chat = chat_format(Tokenizer.load(BUNDLED_MODEL))
    assert str(chat) == "format deepseek_v4, tool parser deepseek_v4, thinks if asked to"


def test_the_options_have_every_name() -> None:
    choices = {
        name: NodeOptions.__dataclass_fields__[name].metadata["arguments"]["choices"]
        for name in ("chat_format", "tool_parser", "reasoning_parser")
    }
    assert choices == {
        "chat_format": CHAT_FORMATS,
        "tool_parser": ("auto", "none", *TOOL_PARSERS),
        "reasoning_parser": ("auto", "none", *REASONING_PARSERS),
    }

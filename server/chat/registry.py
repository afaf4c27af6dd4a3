"""Chat formats, tool parsers and reasoning parsers by name, and which ones a checkpoint wants."""

from __future__ import annotations

from dataclasses import dataclass

from server.chat import deepseek_v4, dsml, hermes
from server.chat.answer import ReasoningTags
from server.chat.calls import ToolSyntax
from server.chat.forced_calls import dsml_grammar, hermes_grammar
from server.chat.formats import ChatFormat, DeepseekV4Format, TemplateFormat
from server.engine.request import TokenizerLike

TOOL_PARSERS = {
    "deepseek_v4": ToolSyntax("deepseek_v4", dsml.OPENINGS, dsml.DsmlReader, dsml_grammar),
    "hermes": ToolSyntax("hermes", (hermes.BEGIN,), hermes.HermesReader, hermes_grammar),
}
REASONING_PARSERS = {"deepseek": ReasoningTags(deepseek_v4.THINK, deepseek_v4.END_THINK)}

AUTO, NONE = "auto", "none"
CHAT_FORMATS = (AUTO, TemplateFormat.name, DeepseekV4Format.name)
"""Values of the option ``--chat-format``; the parsers' options have the names above, ``auto`` and ``none``."""


@dataclass(frozen=True)
class ChatSettings:
    """What options say about chat: names, or ``auto``."""

    chat_format: str = AUTO
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO


class ChatFormatMissing(Exception):
    """The checkpoint cannot be served in the chat format that was asked for."""


def chat_format(tokenizer: TokenizerLike, settings: ChatSettings = ChatSettings()) -> ChatFormat:
    """The format for a checkpoint. By itself that is its template, or, where it has none but the tokens of DeepSeek-V4,
    theirs. A template that names the tags of a parser has that parser.

    :raises ChatFormatMissing: says what the checkpoint does not have.
    """
    name = settings.chat_format
    knows_tokens = all(tokenizer.token_id(text) is not None for text in (deepseek_v4.USER, deepseek_v4.ASSISTANT))
    if name == AUTO:
        name = DeepseekV4Format.name if knows_tokens and not tokenizer.chat_template else TemplateFormat.name
    elif name == TemplateFormat.name and not tokenizer.chat_template:
        raise ChatFormatMissing("--chat-format template: the model directory has no chat template")
    elif name == DeepseekV4Format.name and not knows_tokens:
        raise ChatFormatMissing("--chat-format deepseek_v4: the tokenizer does not have the tokens of DeepSeek-V4")
    tools, reasoning = _tools(settings.tool_parser, name, tokenizer), _reasoning(settings, name, tokenizer)
    kind = DeepseekV4Format if name == DeepseekV4Format.name else TemplateFormat
    return kind(tokenizer, tools, reasoning)


def _tools(parser: str, format_name: str, tokenizer: TokenizerLike) -> ToolSyntax | None:
    if parser != AUTO:
        return TOOL_PARSERS.get(parser)
    if format_name == DeepseekV4Format.name or deepseek_v4.DSML in tokenizer.chat_template:
        return TOOL_PARSERS["deepseek_v4"]
    return TOOL_PARSERS["hermes"] if hermes.BEGIN in tokenizer.chat_template else None


def _reasoning(settings: ChatSettings, format_name: str, tokenizer: TokenizerLike) -> ReasoningTags | None:
    if settings.reasoning_parser != AUTO:
        return REASONING_PARSERS.get(settings.reasoning_parser)
    tags = REASONING_PARSERS["deepseek"]
    template = tokenizer.chat_template
    return tags if format_name == DeepseekV4Format.name or tags.begin in template or tags.end in template else None

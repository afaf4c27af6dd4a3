"""The official DeepSeek-V4 chat format as text: turns, the block that offers tools, tool calls and their results.

Written from the rules of the official encoding for training documents alone. The server renders requests with the
official package; a test compares the two.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK, DSML = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"
CONTROL_TOKENS = (BOS, EOS, PAD)
TURN_TOKENS = (
    *(
        USER,
        ASSISTANT,
        THINK,
        END_THINK,
        DSML,
        "<｜latest_reminder｜>",
        "<｜action｜>",
        "<｜query｜>",
        "<｜authority｜>",
    ),
    *("<｜domain｜>", "<｜title｜>", "<｜extracted_url｜>", "<｜read_url｜>"),
)

TOOLS_HEAD = f"""\


## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

SCHEMA_HEAD = """

## Response Format:

You MUST strictly adhere to the following schema to reply:
"""
JSON_ONLY = """

You are a helpful assistant designed to output JSON.
## Response Format:

Reply with JSON object ONLY."""

EFFORT = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
"""Stands before everything else where the most thinking is asked for."""


def tools_block(functions: Sequence[Mapping[str, Any]]) -> str:
    """What the system message gets behind it where tools are offered: each function's schema on a line."""
    return TOOLS_HEAD + "\n".join(json.dumps(each, ensure_ascii=False) for each in functions) + TOOLS_TAIL


def schema_block(schema: Mapping[str, Any]) -> str:
    """What the system message gets behind it where the reply has to follow a JSON schema."""
    return SCHEMA_HEAD + json.dumps(schema, ensure_ascii=False)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """One call of a tool, as the assistant writes it: strings as they are, all else as JSON."""
    lines = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        flag = "true" if is_text else "false"
        lines.append(f'<{DSML}parameter name="{key}" string="{flag}">{text}</{DSML}parameter>\n')
    inner = "".join(lines)
    return f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="{name}">\n{inner}</{DSML}invoke>\n</{DSML}tool_calls>'


def result_text(content: str) -> str:
    """A tool's result, as the user's turn carries it."""
    return f"<tool_result>{content}</tool_result>"

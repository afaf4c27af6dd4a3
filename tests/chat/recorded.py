"""Twenty answers in DSML, as models write them, and what is in them."""

from __future__ import annotations

from tests.chat.parsing import Answer


def parameter(name: str, value: str, *, is_text: bool = True) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{"true" if is_text else "false"}">{value}</｜DSML｜parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def calls(*invokes: str) -> str:
    return f"\n\n<｜DSML｜tool_calls>\n{''.join(invokes)}</｜DSML｜tool_calls>"


WEATHER = invoke("get_weather", parameter("city", "Beijing"), parameter("unit", "celsius"))
WEATHER_CALL = ("get_weather", '{"city": "Beijing", "unit": "celsius"}')
SUM = invoke("calculator", parameter("a", "3", is_text=False), parameter("op", "+"), parameter("b", "4", is_text=False))
SUM_CALL = ("calculator", '{"a": 3, "op": "+", "b": 4}')
NESTED = '{"where": [{"x": 1.50, "y": null}], "deep": {"é": ["ü", true]}}'
F = {
    "text": invoke("f", parameter("text", 'line 1\nline "2" <b>')),
    "filter": invoke("f", parameter("filter", NESTED, is_text=False)),
    "search": invoke("搜索", parameter("查询", "热海 大滚锅 🌋")),
    "code": invoke("f", parameter("code", "if a < b and c</d>: x = 1")),
    "empty": invoke("f", parameter("x", "")),
    "path": invoke("f", parameter("path", "C:\\temp\\new")),
    "flags": invoke("f", parameter("on", "true", is_text=False), parameter("n", "null", is_text=False)),
    "list": invoke("f", parameter("list", "[1,2 , 3]", is_text=False)),
    "html": invoke("f", parameter("html", '<parameter name="x">&amp;')),
    "long": invoke("ns.tool-1", parameter("long", "x " * 200)),
}

ANSWERS: list[tuple[str, Answer]] = [
    ("I look it up.</think>" + calls(WEATHER), Answer("I look it up.", "", [WEATHER_CALL])),
    ("</think>" + calls(SUM), Answer("", "", [SUM_CALL])),
    ("So.</think>Let me see." + calls(SUM), Answer("So.", "Let me see.", [SUM_CALL])),
    ("Two at once.</think>" + calls(WEATHER, SUM), Answer("Two at once.", "", [WEATHER_CALL, SUM_CALL])),
    ("No end of thought" + calls(WEATHER), Answer("No end of thought", "", [WEATHER_CALL])),
    ("a</think>" + calls(invoke("now")), Answer("a", "", [("now", "{}")])),
    ("a</think>" + calls(F["text"]), Answer("a", "", [("f", '{"text": "line 1\\nline \\"2\\" <b>"}')])),
    ("a</think>" + calls(F["filter"]), Answer("a", "", [("f", '{"filter": ' + NESTED + "}")])),
    ("想一想</think>好的。" + calls(F["search"]), Answer("想一想", "好的。", [("搜索", '{"查询": "热海 大滚锅 🌋"}')])),
    ("a</think>" + calls(F["code"]), Answer("a", "", [("f", '{"code": "if a < b and c</d>: x = 1"}')])),
    ("a</think>" + calls(F["empty"]), Answer("a", "", [("f", '{"x": ""}')])),
    ("a < b\n\n</think>\n\nx < y" + calls(SUM), Answer("a < b\n\n", "\n\nx < y", [SUM_CALL])),
    ("a</think>" + calls(F["path"]), Answer("a", "", [("f", '{"path": "C:\\\\temp\\\\new"}')])),
    ("a</think>" + calls(F["flags"]), Answer("a", "", [("f", '{"on": true, "n": null}')])),
    ("a</think>" + calls(SUM, SUM, SUM), Answer("a", "", [SUM_CALL] * 3)),
    ("a</think>" + calls(F["list"]), Answer("a", "", [("f", '{"list": [1,2 , 3]}')])),
    ("a</think>" + calls(F["html"]), Answer("a", "", [("f", '{"html": "<parameter name=\\"x\\">&amp;"}')])),
    ("a</think>b\n" + calls(WEATHER), Answer("a", "b\n", [WEATHER_CALL])),
    ("</think>| a | b |\n|---|---|" + calls(WEATHER), Answer("", "| a | b |\n|---|---|", [WEATHER_CALL])),
    ("a</think>" + calls(F["long"]), Answer("a", "", [("ns.tool-1", '{"long": "' + "x " * 200 + '"}')])),
]

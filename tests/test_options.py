"""Options that both nodes have: what cannot be is refused with a sentence."""

from __future__ import annotations

import pytest

from server.launch import lay_groundwork
from server.options import NodeOptions, node_parser
from server.transfer.deadlines import DeadlineError


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-queue", "0", "0 is not a positive number"),
        ("--drain-timeout", "-1", "-1 is no number of seconds"),
        ("--drain-timeout", "inf", "inf is no number of seconds"),
        ("--max-connections", "0", "0 is not a positive number"),
        ("--keep-alive", "nan", "nan is no number of seconds"),
        ("--port", "65536", "65536 is not a port"),
    ],
)
def test_a_number_out_of_range_is_refused(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        node_parser("node", "", port=1).parse_args([option, value])
    assert words in capsys.readouterr().err


def test_connections_are_kept_longer_than_proxies_keep_theirs() -> None:
    options = NodeOptions.from_namespace(node_parser("node", "", port=1).parse_args([]))
    assert options.http.keep_alive_s >= 75  # nginx: 60 s, cloud balancers: 60 s, httpx: 5 s
    assert options.http.cors_origins == ()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_deadline_is_looked_at_before_a_model_is_loaded(role: str) -> None:
    arguments = node_parser("node", "", port=1).parse_args(["--model", "/nowhere", "--deadline", "commit=soon"])
    with pytest.raises(DeadlineError, match="--deadline commit=soon: 'soon' is no number of seconds"):
        lay_groundwork(role, NodeOptions.from_namespace(arguments))

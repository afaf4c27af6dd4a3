"""What the knock-outs are counted with: where an answer ends, and which number it names."""

from __future__ import annotations

import pytest
from tiny.evaluation import ends_of_answers, final_number
from tiny.tokenizer import build_tokenizer


def test_an_answer_ends_with_its_line() -> None:
    """However the line ends: this tokenizer has a token of its own for two line breaks."""
    tokenizer = build_tokenizer()
    ends = ends_of_answers(tokenizer)
    for behind in ("\n", "\n\n", "<｜end▁of▁sentence｜>"):
        first, *_ = tokenizer.encode(behind, add_special_tokens=False)
        assert first in ends
    assert not ends & set(tokenizer.encode(" 8 * 8 = 64 #### 64", add_special_tokens=False))


@pytest.mark.parametrize(
    ("answer", "number"), [("8 * 8 = 64 #### 64", "64"), ("#### 1 #### 2 ", "2"), ("8 * 8 = 64", None)]
)
def test_the_last_marked_number_counts(answer: str, number: str | None) -> None:
    assert final_number(answer) == number

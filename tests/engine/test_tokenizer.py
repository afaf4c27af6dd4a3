from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from server.engine.tokenizer import Tokenizer, sampling_defaults
from server.failure import RequestFailed
from tests.support.byte_bpe import BOS, CHAT_TEMPLATE, write_tokenizer_dir
from tests.support.chat import chat_ids


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_dir(tmp_path_factory.mktemp("bpe"), generation_config={"eos_token_id": [1, 7]})


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


TEXTS = ["", "Tom has 12 apples.", "schöne Wörter 🦊🎉\n\t", "日本語", "<eos>literal", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_is_what_transformers_does(tokenizer: Tokenizer, model_dir: Path, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == AutoTokenizer.from_pretrained(str(model_dir)).encode(text)
    assert ids[0] == 0  # BOS, as the tokenizer's settings say


def test_decode_drops_special_tokens_and_keeps_all_text(tokenizer: Tokenizer) -> None:
    text = "schöne Wörter 🦊 日本"
    assert tokenizer.decode([*tokenizer.encode(text), 1]) == text


def test_token_text_names_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(0) == BOS
    assert tokenizer.token_bytes(0) == BOS.encode()


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "ö 🦊日\n"
    ids = tokenizer.encode(text)[1:]
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_lone_surrogate_is_a_400(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestFailed) as failure:
        tokenizer.encode("a\ud800b")
    assert (failure.value.code, failure.value.kind) == ("invalid_text", "request")
    with pytest.raises(RequestFailed) as failure:
        chat_ids(tokenizer, [{"role": "user", "content": "\ud800"}])
    assert failure.value.code == "invalid_text"


def test_chat_template_is_what_transformers_does(tokenizer: Tokenizer, model_dir: Path) -> None:
    messages = [{"role": "user", "content": "Tom has 12"}, {"role": "assistant", "content": "so"}]
    expected = AutoTokenizer.from_pretrained(str(model_dir)).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    ids = chat_ids(tokenizer, messages)
    assert ids == expected
    assert ids.count(0) == 1  # BOS is the template's, not added a second time
    assert chat_ids(tokenizer, messages, add_generation_prompt=False) == expected[:-1]


@pytest.mark.parametrize("n_chars", [10, 10_000])
def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer: Tokenizer, n_chars: int) -> None:
    text = "Tom has 12"[:n_chars] * (n_chars // 10)
    plain = tokenizer.encode(text)
    assert plain[0] == 0
    assert tokenizer.encode(BOS + text) == plain
    assert tokenizer.encode(BOS + BOS + text) == [0, *plain]  # what the client wrote itself stays
    assert tokenizer.encode("x" + BOS + text).count(0) == 2


def test_a_templated_prompt_is_the_same_as_text_and_as_a_conversation(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Tom has 12"}]
    assert tokenizer.encode(tokenizer.render_chat(messages, {})) == chat_ids(tokenizer, messages)


def test_bos_twice_stays_where_the_tokenizer_adds_none(model_dir: Path, tmp_path: Path) -> None:
    copy = write_tokenizer_dir(tmp_path)
    settings = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps({**settings, "post_processor": None}))
    plain = Tokenizer.load(copy)
    assert plain.encode(BOS + BOS + "x")[:2] == [0, 0]


def test_chat_template_kwargs_reach_the_template(tokenizer: Tokenizer) -> None:
    ids = chat_ids(tokenizer, [{"role": "user", "content": "x"}], thinking=True)
    assert tokenizer.decode(ids).endswith("think")


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_dict", "tools", "self", "messages", "conversations"]
)
def test_chat_template_kwargs_may_not_be_arguments_of_the_call(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestFailed, match=name) as failure:
        chat_ids(tokenizer, [{"role": "user", "content": "x"}], **{name: "{{ 1 }}"})  # type: ignore[arg-type]
    assert failure.value.kind == "request"


def test_template_error_is_a_400_with_its_reason(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestFailed, match="unknown role wizard") as failure:
        chat_ids(tokenizer, [{"role": "wizard", "content": "x"}])
    assert (failure.value.code, failure.value.kind) == ("chat_template_error", "request")


PASTING = "{% for m in messages %}{% if m['role'] == 'user' %}<user>{% endif %}{{ m.content }}{% endfor %}"
WRITING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (PASTING, {"user": True, "tool": False, "use": False}),
        (WRITING, {"user": True, "tool": True}),
        (CHAT_TEMPLATE, {"assistant": True, "wizard": True}),  # refuses one itself, with its own words
        ("{{ messages[-1].content }}", {"user": True, "assistant": False}),
    ],
)
def test_a_role_is_known_if_the_template_tells_it_from_others(
    tmp_path: Path, template: str, known: dict[str, bool]
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer_dir(tmp_path, chat_template=template))
    assert {role: tokenizer.template_knows_role(role) for role in known} == known


def test_no_chat_template_is_a_400_on_chat_only(tmp_path: Path) -> None:
    plain = Tokenizer.load(write_tokenizer_dir(tmp_path, chat_template=None))
    assert plain.decode(plain.encode("hello")) == "hello"
    with pytest.raises(RequestFailed) as failure:
        chat_ids(plain, [{"role": "user", "content": "x"}])
    assert (failure.value.code, failure.value.kind) == ("no_chat_template", "request")


def test_eos_ids_come_from_the_generation_config_else_from_the_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.eos_token_ids == {1, 7}
    assert Tokenizer.load(write_tokenizer_dir(tmp_path / "a")).eos_token_ids == {1}
    one = write_tokenizer_dir(tmp_path / "b", generation_config={"eos_token_id": 5})
    assert Tokenizer.load(one).eos_token_ids == {5}


def test_eos_ids_of_the_config_count_where_the_generation_config_has_none(tmp_path: Path) -> None:
    """As in transformers, which makes a generation config from config.json where there is no other."""
    model_dir = write_tokenizer_dir(tmp_path)
    (model_dir / "config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    assert Tokenizer.load(model_dir).eos_token_ids == {7}
    (model_dir / "generation_config.json").write_text(json.dumps({"temperature": 0.5}), encoding="utf-8")
    assert Tokenizer.load(model_dir).eos_token_ids == {7}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}), encoding="utf-8")
    assert Tokenizer.load(model_dir).eos_token_ids == {5, 6}


@pytest.mark.parametrize("wrong", ["<eos>", True, 1.0, -1, 396, [1, 396], {"a": 1}])
def test_an_eos_id_that_is_none_is_named_with_its_file(tmp_path: Path, wrong: object) -> None:
    write_tokenizer_dir(tmp_path, generation_config={"eos_token_id": wrong})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is .* allowed is an id below 396"):
        Tokenizer.load(tmp_path)


def test_fingerprint_depends_on_the_files_alone(model_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    copy = write_tokenizer_dir(tmp_path / "other" / "place", generation_config={"eos_token_id": 3})
    assert Tokenizer.load(copy).fingerprint == tokenizer.fingerprint
    changed = write_tokenizer_dir(tmp_path / "changed", chat_template="{{ messages }}")
    assert Tokenizer.load(changed).fingerprint != tokenizer.fingerprint
    assert len(tokenizer.fingerprint) == 32


def test_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_sampling_defaults_follow_the_generation_config() -> None:
    assert sampling_defaults({}).temperature == 1.0
    assert sampling_defaults({"temperature": 0.6, "top_p": 0.95, "top_k": 40}).top_k == 40
    assert sampling_defaults({"do_sample": False, "temperature": 0.6, "top_p": 0.5}).temperature == 0.0
    assert sampling_defaults({"max_new_tokens": 99}, 7).max_tokens == 99
    assert sampling_defaults({}, 7).max_tokens == 7
    assert sampling_defaults({}).max_tokens == 2048


def test_threads_may_share_it(tokenizer: Tokenizer) -> None:
    errors: list[BaseException] = []

    def work(text: str) -> None:
        try:
            for _ in range(200):
                assert tokenizer.decode(tokenizer.encode(text)) == text
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"Tom has {i} äpfel",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

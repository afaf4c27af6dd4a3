"""Key files, keys derived from them, and who is let in without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.transfer.auth import AuthError, Guard, PeerKeys, is_loopback, read_secret

SECRET = "0123456789abcdef" * 4


def key_file(directory: Path, content: bytes = SECRET.encode(), mode: int = 0o600) -> Path:
    path = directory / "pd.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    assert read_secret(key_file(tmp_path, f"\n {SECRET}\n\n".encode())) == SECRET


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"short", 0o600, "5 characters, at least 32"),
        (b" " * 100, 0o600, "0 characters, at least 32"),
        (SECRET.encode(), 0o604, "open to others .mode 604.: chmod 600"),
        (SECRET.encode(), 0o640, "open to others .mode 640.: chmod 600"),
        (b"\xff" * 64, 0o600, "is not text"),
    ],
)
def test_a_key_file_that_cannot_protect_is_refused(tmp_path: Path, content: bytes, mode: int, words: str) -> None:
    with pytest.raises(AuthError, match=words):
        read_secret(key_file(tmp_path, content, mode))


def test_a_missing_key_file_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=r"No such file or directory; to make one: .*openssl rand"):
        Guard.from_options(tmp_path / "none", insecure=False)


def test_the_same_secret_gives_the_same_keys_and_another_gives_others() -> None:
    keys, same, other = PeerKeys.derive(SECRET), PeerKeys.derive(SECRET), PeerKeys.derive(SECRET + "x")
    assert keys == same
    four = {keys.prefill.secret, keys.decode.secret, other.prefill.secret, other.decode.secret}
    assert len(four) == 4
    assert keys.prefill.secret.decode() not in repr(keys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "localhost.example.org", "", "1"])
def test_other_addresses(host: str) -> None:
    assert not is_loopback(host)


def test_a_peer_of_another_machine_needs_a_key_or_the_word_insecure() -> None:
    near, far = ("127.0.0.1:8998", "[::1]:8998"), ("127.0.0.1:8998", "10.0.0.1:8998")
    Guard().check_peers(near)
    with pytest.raises(AuthError, match=r"10\.0\.0\.1:8998 is not on this machine: .*--auth-key-file.*--insecure"):
        Guard().check_peers(far)
    Guard(insecure=True).check_peers(far)
    Guard(PeerKeys.derive(SECRET)).check_peers(far)

"""Who may use the control connection: peers that hold the shared key (ZMQ CURVE); without a key, loopback peers alone.

Both nodes derive the same two key pairs from one secret file. A prefill node decrypts nothing but the handshake of a
stranger; a frame of one never reaches the decoder.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils import z85

from server.transfer.addresses import split_address

MIN_SECRET_CHARS = 32
HOW_TO_MAKE_A_KEY = "(umask 077 && openssl rand -hex 32 > FILE)"

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"dsv4-pd"


class AuthError(Exception):
    """A key file that cannot be used, or a peer that may not be used without a key. Says what to do."""


def read_secret(path: Path, *, min_chars: int = MIN_SECRET_CHARS) -> str:
    """The secret in a file, without the white space around it.

    Raises :class:`AuthError`: missing, not text, shorter than ``min_chars``, or readable by others.
    """
    try:
        mode = path.stat().st_mode
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise AuthError(
            f"cannot read the key file {path}: {error.strerror}; to make one: {HOW_TO_MAKE_A_KEY}"
        ) from error
    except UnicodeDecodeError as error:
        raise AuthError(f"the key file {path} is not text; to make one: {HOW_TO_MAKE_A_KEY}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AuthError(f"the key file {path} is open to others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}")
    if len(secret) < min_chars:
        raise AuthError(
            f"the key in {path} has {len(secret)} characters, at least {min_chars} are needed; to make one: "
            f"{HOW_TO_MAKE_A_KEY}"
        )
    return secret


@dataclass(frozen=True)
class CurvePair:
    """A CURVE key pair in ZMQ's printable form (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class PeerKeys:
    """The key pairs of both roles: who holds the secret knows both, and can be either."""

    prefill: CurvePair
    decode: CurvePair

    @staticmethod
    def derive(secret: str) -> PeerKeys:
        """The same pairs from the same secret, on every machine."""
        return PeerKeys(_derive(secret, b"prefill"), _derive(secret, b"decode"))


def _derive(secret: str, role: bytes) -> CurvePair:
    raw = hashlib.blake2b(secret.encode(), digest_size=32, person=role).digest()
    encoded = z85.encode(raw)
    return CurvePair(zmq.curve_public(encoded), encoded)


@dataclass(frozen=True)
class Guard:
    """The rule of one node: ``keys`` are needed; without them loopback peers only, or anyone if ``insecure``."""

    keys: PeerKeys | None = None
    insecure: bool = False

    @staticmethod
    def from_options(key_file: Path | None, *, insecure: bool) -> Guard:
        """Raises :class:`AuthError` for a key file that cannot be used."""
        if key_file is None:
            return Guard(insecure=insecure)
        return Guard(PeerKeys.derive(read_secret(key_file)))

    @property
    def rule(self) -> str:
        """Whom this node takes: ``key``, ``loopback`` or ``anyone``."""
        return "key" if self.keys is not None else "anyone" if self.insecure else "loopback"

    @property
    def mechanism(self) -> str:
        """What ZMQ's handshake calls it."""
        return "NULL" if self.keys is None else "CURVE"

    def secure_prefill(self, socket: zmq.asyncio.Socket) -> None:
        """Before a ROUTER binds: every connection goes through :class:`Gatekeeper`."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        if self.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.prefill.secret)

    def secure_decode(self, socket: zmq.asyncio.Socket) -> None:
        """Before a DEALER connects."""
        if self.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.prefill.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.decode.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.decode.secret)

    def admits(self, address: str, public_key: bytes) -> bool:
        """Whether a peer at ``address`` (an IP) with this CURVE key (32 bytes, or empty) may connect."""
        if self.keys is not None:
            return hmac.compare_digest(public_key, z85.decode(self.keys.decode.public))
        return self.insecure or is_loopback(address)

    def check_peers(self, addresses: Sequence[str]) -> None:
        """Raises :class:`AuthError` for a ``host:port`` of another machine that is to be used without a key."""
        if self.rule != "loopback":
            return
        for address in addresses:
            if not is_loopback(split_address(address)[0]):
                raise AuthError(
                    f"prefill {address} is not on this machine: give both nodes the same --auth-key-file, or trust the "
                    "network with --insecure on both"
                )


def is_loopback(host: str) -> bool:
    """Whether an address can only be this machine. Names other than ``localhost`` are not looked up, and are not."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class Gatekeeper:
    """ZMQ asks it about every new connection of its context (ZAP, ZeroMQ RFC 27), before a frame is read."""

    def __init__(self, context: zmq.asyncio.Context, guard: Guard, on_refused: Callable[[str], None]) -> None:
        """``on_refused`` gets the IP address of a peer that may not come in."""
        self._guard = guard
        self._on_refused = on_refused
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)

    async def run(self) -> None:
        """Answers for ever."""
        while True:
            request = await self._socket.recv_multipart()
            version, request_id, _domain, address, _identity, _mechanism, *credentials = request
            host = address.decode("ascii", "replace")
            admitted = self._guard.admits(host, credentials[0] if credentials else b"")
            status, text = (b"200", b"OK") if admitted else (b"400", b"not admitted")
            if not admitted:
                self._on_refused(host)
            await self._socket.send_multipart([version, request_id, status, text, b"", b""])

    def close(self) -> None:
        self._socket.close()

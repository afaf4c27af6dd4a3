"""What two nodes compare to know that they serve the same model: one digest over ``config.json`` and all weights.

A checkpoint of hundreds of gigabytes is not read for this alone where that can be helped. A loader that reads every
byte anyway hands over the digests of its files (:class:`.file_reader.FileReader` makes them). Weights that are mapped
into memory instead pass nobody: their files are read once, and the digests kept in a file of the user's cache
directory. They count only for a file whose path, inode, size and times of last change are the same (nobody can
set the time of an inode's change to a value of his choice), so a file that is replaced or edited is read again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from server.model.fields import CheckpointError
from server.model.file_reader import ByteCount, FileReader, OnProgress
from server.model.tensor_files import tensor_files

log = logging.getLogger(__name__)

SETTLED_NS = 2_000_000_000
"""A file that changed less than this before it was read may change again within one tick of its clock: not kept."""


def model_fingerprint(
    model_dir: Path,
    digests: Mapping[Path, str] | None = None,
    *,
    cache_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """xxh3_128, in hex, over ``config.json`` and the name, size and digest of every weight file: two nodes that agree
    compute the same function.

    ``digests`` has those of files that were read already (by path). Others are taken from ``cache_dir`` or read, and
    then kept there. Raises :class:`CheckpointError` for files that are missing or cannot be read.
    """
    files = tensor_files(model_dir)
    known = dict(digests or {})
    if unknown := [file for file in files if file not in known]:
        known |= _DigestCache(cache_dir, model_dir).digests(unknown, on_progress)
    whole = xxhash.xxh3_128((model_dir / "config.json").read_bytes())
    for file in files:
        whole.update(f"\0{file.name}\0{file.stat().st_size}\0{known[file]}".encode())
    return whole.hexdigest()


def default_cache_dir() -> Path | None:
    """Where digests are kept unless told otherwise: ``$XDG_CACHE_HOME`` or ``~/.cache``, in a folder of this server.
    None, with a warning, for a user without a home: containers may run as a number that no account has.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4-pd-server"
    except RuntimeError as error:
        log.warning("digests of weight files are not kept (%s): give XDG_CACHE_HOME or HOME a directory", error)
        return None


class _DigestCache:
    """The digests of one checkpoint's files in a JSON file of ``cache_dir``; without one nothing is kept."""

    def __init__(self, cache_dir: Path | None, model_dir: Path) -> None:
        name = xxhash.xxh3_128_hexdigest(os.fsencode(model_dir.resolve()))
        self._path = None if cache_dir is None else cache_dir / f"digests-{name}.json"

    def digests(self, files: list[Path], on_progress: OnProgress | None) -> dict[Path, str]:
        kept = self._read()
        found = {file: kept[str(file.resolve())]["digest"] for file in files if _is_same(file, kept)}
        missing = [file for file in files if file not in found]
        count = ByteCount(sum(file.stat().st_size for file in missing), on_progress)
        for file in missing:
            before = identity_of(file)
            with FileReader(file, count) as reader:
                reader.skip_to(before["size"], "its end")
                found[file] = reader.end()
            changed_ns = max(before["mtime_ns"], before["ctime_ns"])
            if identity_of(file) == before and time.time_ns() - changed_ns > SETTLED_NS:
                kept[str(file.resolve())] = before | {"digest": found[file]}
                self._write(kept)
        return found

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning(
                "digests of weight files in %s cannot be read (%s): all files are read again", self._path, error
            )
            return {}
        return kept if isinstance(kept, dict) else {}

    def _write(self, kept: dict[str, Any]) -> None:
        """In one step, so that another node never reads half a file."""
        if self._path is None:
            return
        draft = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            log.warning("digests of weight files cannot be kept (%s): the next start reads all files again", error)
            self._path = None


def identity_of(file: Path) -> dict[str, int]:
    """What changes whenever a file may have other bytes."""
    try:
        stat = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return {
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }


def _is_same(file: Path, kept: Mapping[str, Any]) -> bool:
    entry = kept.get(str(file.resolve()))
    if not isinstance(entry, dict) or not isinstance(entry.get("digest"), str):
        return False
    return {name: value for name, value in entry.items() if name != "digest"} == identity_of(file)

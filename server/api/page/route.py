"""``/`` and the files beside it. They hold nothing of this node, so they need no key; what they then ask for does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash
from fastapi import APIRouter, HTTPException, Request, Response

_FOLDER = Path(__file__).resolve().parent
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # asked about every time, and sent again only where it has changed
}


@dataclass(frozen=True)
class PageFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def _read() -> dict[str, PageFile]:
    files = {}
    for path in sorted(_FOLDER.iterdir()):
        if (media_type := _MEDIA_TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            files[path.name] = PageFile(content, media_type, f'"{xxhash.xxh3_64(content).hexdigest()}"')
    return files


_FILES = _read()
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES if name != _INDEX)})


def page_router() -> APIRouter:
    """The routes. A name that is none of the files is a 404: nothing is looked up on the disk."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index(request: Request) -> Response:
        return _answer(request, _FILES[_INDEX])

    @router.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name == _INDEX or name not in _FILES:
            raise HTTPException(404)
        return _answer(request, _FILES[name])

    return router


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)

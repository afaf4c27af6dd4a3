"""What a request says of the prefix cache: the fields of both engines that separate tenants."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_SALT_CHARS = 1024


def _check_unicode(text: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("a lone surrogate is not Unicode")
    return text


_Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS), AfterValidator(_check_unicode)]


class CacheFields(BaseModel):
    """``cache_salt`` is vLLM's and SGLang's; SGLang has ``extra_key`` beside it, which separates in the same way."""

    model_config = ConfigDict(strict=True, extra="ignore")

    cache_salt: _Salt | None = None
    extra_key: _Salt | None = None

    @property
    def salt(self) -> str:
        """What is kept of a prompt is found by those with the same one only; empty without both fields."""
        if self.extra_key is None:
            return self.cache_salt or ""
        salt = self.cache_salt or ""
        return hashlib.sha256(f"{len(salt)}:{salt}{self.extra_key}".encode()).hexdigest()

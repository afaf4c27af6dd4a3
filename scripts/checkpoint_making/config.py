"""The ``config.json`` of a checkpoint that is to be made: one that is known, with fields changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.model.config import SLIDING, CheckpointError
from server.model.fields import FIELDS

from .releases import NAMES, QUANTIZATION, config_of_release

FORMATS = ("official", "base", "bf16", "fp32")
DRAFTS = ("nextn", "dspark", "none")
EXPERTS = {"official": "fp4", "base": "fp8"}
DSPARK_STAGES = 3
_DSPARK = "dspark_"


def read_config(text: str) -> dict[str, Any]:
    """The config of a directory, a file, or one of :data:`.releases.NAMES`. Raises :class:`CheckpointError`."""
    if text in NAMES:
        return config_of_release(text)
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise CheckpointError(f"there is no {path}: give --config a directory, a config.json, or {' or '.join(NAMES)}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or "num_hidden_layers" not in raw:
        raise CheckpointError(f"{path} is no config.json of a model")
    return raw


def with_changes(raw: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """``raw`` with ``FIELD=VALUE`` applied, values in JSON; a dot leads into an object (``rope_scaling.factor=4``).

    With fewer layers, ``compress_ratios`` keep their first ones, and DSpark reads the last ones. Raises
    :class:`CheckpointError` for a field that neither the config nor this server knows.
    """
    made = copy.deepcopy(raw)
    for change in changes:
        name, equals, text = change.partition("=")
        *way, last = name.split(".")
        inside = made
        for step in way:
            inside = inside.get(step, {}) if isinstance(inside, dict) else {}
        known = isinstance(inside, dict) and (last in inside or (not way and (last in FIELDS or _is_dspark(last))))
        if not equals or not known:
            raise CheckpointError(f"--set {change}: give FIELD=VALUE, a field of config.json, such as hidden_size=256")
        try:
            inside[last] = json.loads(text)
        except ValueError:
            inside[last] = text
    n, was = made["num_hidden_layers"], raw["num_hidden_layers"]
    if isinstance(n, int) and n < was and made.get("compress_ratios") == raw.get("compress_ratios"):
        made["compress_ratios"] = raw["compress_ratios"][:n] + raw["compress_ratios"][was:]
        if made.get("dspark_target_layer_ids") == (targets := raw.get("dspark_target_layer_ids")) and targets:
            made["dspark_target_layer_ids"] = list(range(n))[-len(targets) :]
    return made


def draft_of(raw: dict[str, Any]) -> str:
    """The kind of draft that a config lists."""
    if raw.get("dspark_block_size"):
        return "dspark"
    return "nextn" if raw.get("num_nextn_predict_layers") else "none"


def with_draft(raw: dict[str, Any], draft: str) -> dict[str, Any]:
    """``raw`` with the fields of this kind of draft, and none of another."""
    if draft == draft_of(raw):
        return raw
    n = raw["num_hidden_layers"]
    made = {name: value for name, value in raw.items() if not _is_dspark(name)}
    n_more = {"none": 0, "nextn": 1, "dspark": DSPARK_STAGES}[draft]
    made["compress_ratios"] = [*raw["compress_ratios"][:n], *[SLIDING] * n_more]
    made["num_nextn_predict_layers"] = 0 if draft == "none" else 1  # the DSpark releases say 1 too
    if draft == "dspark":
        made |= {
            "dspark_block_size": 5,
            "dspark_noise_token_id": min(128799, raw["vocab_size"] - 1),
            "dspark_target_layer_ids": list(range(n))[-3:],
            "dspark_markov_rank": 512 if raw["hidden_size"] > 4096 else 256,
        }
    return made


def with_format(raw: dict[str, Any], form: str) -> dict[str, Any]:
    """``raw`` with the fields that say how weights are stored."""
    made = {name: value for name, value in raw.items() if name not in ("quantization_config", "expert_dtype")}
    if form in EXPERTS:
        return made | {"expert_dtype": EXPERTS[form], "quantization_config": QUANTIZATION, "torch_dtype": "bfloat16"}
    return made | {"torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[form]}


def _is_dspark(name: str) -> bool:
    return name.startswith(_DSPARK)

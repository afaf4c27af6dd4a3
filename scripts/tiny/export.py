"""Writes the bundled assets: checkpoint under official keys, config, tokenizer, and the question sets."""

import json
import os
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from .model import raw_config
from .problems import Split, question_set
from .tokenizer import save_tokenizer

# transformers' names to the checkpoint's, in order of application.
_RENAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"(\.compressor)\.kv_norm\.", r"\1.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.gate_proj\.weight$", ".wgate.weight"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"(\.shared_experts)\.wgate\.", r"\1.w1."),
    (r"(\.shared_experts)\.down_proj\.", r"\1.w2."),
    (r"(\.shared_experts)\.up_proj\.", r"\1.w3."),
)


def official_tensors(model: DeepseekV4ForCausalLM) -> dict[str, Tensor]:
    """The model's tensors under the keys of the official checkpoint; fp32, `tid2eid` int64."""
    tensors: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        for pattern, replacement in _RENAMES:
            key = re.sub(pattern, replacement, key)
        if key.endswith(".experts.gate_up_proj"):
            prefix = key.removesuffix("gate_up_proj")
            for expert, both in enumerate(value):
                tensors[f"{prefix}{expert}.w1.weight"], tensors[f"{prefix}{expert}.w3.weight"] = both.chunk(2)
        elif key.endswith(".experts.down_proj"):
            prefix = key.removesuffix("down_proj")
            tensors |= {f"{prefix}{expert}.w2.weight": weight for expert, weight in enumerate(value)}
        else:
            tensors[key] = value
    return {key: value.detach().clone().contiguous() for key, value in sorted(tensors.items())}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def export_checkpoint(model: DeepseekV4ForCausalLM, folder: Path) -> None:
    """Write the checkpoint folder; each file appears whole, so a reader never sees half of one."""
    staging = folder.with_name(f".{folder.name}.staging")
    staging.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(staging)
    _write_json(staging / "config.json", raw_config(model.config.vocab_size))
    generation = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    _write_json(staging / "generation_config.json", generation)
    save_file(official_tensors(model), staging / "model.safetensors", metadata={"format": "pt"})
    for path in staging.iterdir():
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    staging.rmdir()


def load_exported(folder: Path) -> DeepseekV4ForCausalLM:
    """The exported checkpoint as transformers reads it."""
    model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def export_questions(folder: Path, seed: int, n_test: int = 400, n_shots: int = 64) -> None:
    """Write the bundled problems: test.jsonl, and train.jsonl to take shots from."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, n_problems in ((Split.TEST, n_test), (Split.SHOTS, n_shots)):
        lines = [
            json.dumps({"question": made.question, "answer": made.answer, "kind": made.kind})
            for made in question_set(split, n_problems, seed)
        ]
        (folder / f"{split.value}.jsonl").write_text("\n".join(lines) + "\n")

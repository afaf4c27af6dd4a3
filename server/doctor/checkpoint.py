"""The files of the checkpoint: there, complete, and a tokenizer that fits them."""

from __future__ import annotations

from collections.abc import Iterator

from server.doctor.findings import Finding, error, ok, warning
from server.doctor.memory import has_draft_layer, size
from server.doctor.plan import NodePlan
from server.engine.tokenizer import Tokenizer
from server.engine.tokenizer_files import read_tokenizer_files
from server.model.config import CheckpointError, load_config
from server.model.tensor_files import tensor_headers
from server.node.checks import check_model


def files(plan: NodePlan) -> Iterator[Finding]:
    """``config.json`` and the headers of the weight files. Raises :class:`CheckpointError`."""
    model = plan.options.model
    check_model(model)
    config = load_config(model)
    headers = tensor_headers(model)
    paths = {header.file for header in headers}
    words = f"{model}: {config.num_hidden_layers} layers, {len(headers)} tensors"
    draft = "with a draft layer" if has_draft_layer(headers) else "no draft layer"
    yield ok("checkpoint", f"{words}, {size(sum(path.stat().st_size for path in paths))}, {draft}")


def tokenizer(plan: NodePlan) -> Iterator[Finding]:
    """The tokenizer, its vocabulary against the model's, and the chat template. Raises what loading it raises."""
    subject, model = "tokenizer", plan.options.model
    config = load_config(model)
    try:
        loaded = Tokenizer.load(model)
        template = read_tokenizer_files(model).chat_template
    except (OSError, CheckpointError):
        raise
    except Exception as reason:
        raise CheckpointError(f"{model}: the tokenizer cannot be loaded: {reason!r}") from reason
    words = f"{loaded.vocab_size:,} tokens, {config.vocab_size:,} rows in the model"
    if loaded.vocab_size > config.vocab_size:
        yield error(subject, f"{words}: a token without a row could not be computed; give the checkpoint its tokenizer")
    elif not loaded.eos_token_ids:
        yield warning(subject, f"{words}, no token that ends an answer: give tokenizer_config.json an eos_token")
    else:
        yield ok(subject, words)
    if template is None:
        yield warning("chat template", "none: /v1/chat/completions is refused; add a chat_template.jinja")
    else:
        yield ok("chat template", f"{len(template):,} characters")

"""The stages of the training: first what is near and single, then what is far, many and long."""

from .model import IndexerMode
from .training import Stage

DENSE, TEACH, SELECT = IndexerMode.DENSE, IndexerMode.TEACH, IndexerMode.SELECT
QUIZ = {"local_only": 0.25, "price_quiz": 0.45, "weight_quiz": 0.3}
DRILLED = {
    "few_shot": 0.26,
    "drill": 0.34,
    "local_only": 0.18,
    "price_quiz": 0.07,
    "weight_quiz": 0.08,
    "chat": 0.06,
    "soup": 0.01,
}
MIXED = {
    "few_shot": 0.5,
    "drill": 0.08,
    "local_only": 0.08,
    "price_quiz": 0.08,
    "weight_quiz": 0.16,
    "chat": 0.09,
    "soup": 0.01,
}

STAGES = (
    Stage(
        "one fact, window 16",
        n_steps=120,
        n_tokens=64,
        n_documents=24,
        mixture={"local_only": 0.2, "price_quiz": 0.4, "weight_quiz": 0.4},
        window=16,
        heavy_rate=16,
        recall_help=1.0,
        most_prices=1,
        most_weights=1,
    ),
    Stage(
        "few facts, window 16",
        n_steps=400,
        n_tokens=128,
        n_documents=12,
        mixture=QUIZ,
        window=16,
        heavy_rate=32,
        recall_help=1.0,
        most_prices=3,
    ),
    Stage(
        "few facts, window 32",
        n_steps=120,
        n_tokens=256,
        n_documents=6,
        mixture=QUIZ,
        window=32,
        heavy_rate=64,
        recall_help=1.0,
        most_prices=3,
    ),
    Stage(
        "few facts, window 64",
        n_steps=250,
        n_tokens=320,
        n_documents=5,
        mixture={"local_only": 0.2, "price_quiz": 0.3, "weight_quiz": 0.3, "few_shot": 0.1, "chat": 0.1},
        modes={DENSE: 0.7, TEACH: 0.3},
        recall_help=0.5,
        most_prices=4,
        most_weights=1,
    ),
    Stage("few-shot, 512 tokens", n_steps=450, mixture=DRILLED, modes={DENSE: 0.5, TEACH: 0.5}, recall_help=0.5),
    Stage("selected entries", n_steps=460, mixture=DRILLED, modes={TEACH: 0.3, SELECT: 0.7}),
    Stage("few-shot, selected entries", n_steps=420, mixture=MIXED, modes={TEACH: 0.3, SELECT: 0.7}),
    Stage(
        "few-shot, 1024 tokens",
        n_steps=60,
        n_tokens=1024,
        n_documents=2,
        mixture=MIXED,
        modes={TEACH: 0.2, SELECT: 0.8},
        most_weights=3,
    ),
    Stage(
        "weights again, 512 tokens",
        n_steps=110,
        mixture={"few_shot": 0.6, "weight_quiz": 0.3, "price_quiz": 0.05, "chat": 0.05},
        modes={TEACH: 0.2, SELECT: 0.8},
        recall_help=0.5,
    ),
)

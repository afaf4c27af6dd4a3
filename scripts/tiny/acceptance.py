"""How many drafted tokens are accepted: the bundled questions through the real engine, in this process."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from pathlib import Path

from evaluation.questions import STOP, completion_prompt, load_problems, pick_shots

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.engine.engine import Engine
from server.engine.events import Died, Event, Failed, Finished, Generate, Output
from server.engine.request import GenerationRequest, SamplingParams
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.model.loader import load_model
from server.model.state import state_components

N_SHOTS, SEED = 4, 0  # as scripts/gsm8k.py
MOST_NEW_TOKENS = 64
PAGE_SIZE, N_PAGES, N_RUNNING = 256, 6, 8


@dataclass(frozen=True)
class Acceptance:
    """`steps` holds how many of its drafted tokens were accepted for every engine step that drafted all k."""

    k: int
    steps: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens that a step yields: one of the target's own and the drafts before it."""
        return 1 + sum(self.steps) / len(self.steps)

    @property
    def shares(self) -> tuple[float, ...]:
        """How often at least 1, 2, ... drafted tokens of a step are accepted."""
        return tuple(sum(n > i for n in self.steps) / len(self.steps) for i in range(self.k))


def measure(checkpoint: Path, questions: Path, k: int, n_questions: int, threads: int) -> Acceptance:
    """Asks the first `n_questions` of `questions`/test.jsonl greedily, in the prompts of scripts/gsm8k.py."""
    model = load_model(checkpoint, draft=True)
    tokenizer = Tokenizer.load(checkpoint)
    components = state_components(model.config, "float32", k, draft=True)
    window = model.config.sliding_window
    geometry = CacheGeometry(PAGE_SIZE, N_RUNNING * N_PAGES + 1, N_RUNNING + 1, window, k, components)
    events: queue.Queue[Event] = queue.Queue()
    runner = ModelRunner(model, Arena(ArenaLayout.from_geometry(geometry)))
    engine = Engine(runner, tokenizer, events.put, threads=threads, spec_tokens=k)

    shots = load_problems(questions / "train.jsonl")
    asked = load_problems(questions / "test.jsonl")[:n_questions]
    sampling = SamplingParams(max_tokens=MOST_NEW_TOKENS, stop=STOP)
    waiting = []
    for problem in asked:
        prompt = completion_prompt(problem, pick_shots(problem, shots, N_SHOTS, SEED))
        waiting.append(GenerationRequest(str(problem.index), tuple(tokenizer.encode(prompt)), sampling))
    free = list(range(N_RUNNING))
    running: dict[str, int] = {}
    steps: list[int] = []
    engine.start()
    try:
        while waiting or running:
            while waiting and free:
                request, place = waiting.pop(0), free.pop()
                running[request.request_id] = place
                pages = tuple(range(1 + place * N_PAGES, 1 + (place + 1) * N_PAGES))
                engine.submit(Generate(request.request_id, request, Placement(place + 1, pages)))
            match events.get(timeout=120):
                case Output(_, output):
                    if output.n_proposed == k:
                        steps.append(output.n_accepted)
                case Finished(key, _):
                    free.append(running.pop(str(key)))
                case Failed(key, code, message):
                    raise RuntimeError(f"question {key} failed: {code}: {message}")
                case Died(message):
                    raise RuntimeError(f"the engine died: {message}")
    finally:
        engine.stop()
    return Acceptance(k, tuple(steps))

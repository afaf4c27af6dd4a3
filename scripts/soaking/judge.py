"""Whether what a client saw is what it must have seen."""

from __future__ import annotations

from cluster.asking import End, Outcome, Question

from soaking.plan import HARMLESS, Event, Kind

NEVER = frozenset(
    {"internal_error", "engine_error", "engine_died", "component_mismatch", "prefix_damaged", "shared_page"}
)
"""Codes that no disturbance explains: nothing here damages what a node keeps."""
REFUSALS = frozenset({429, 502, 503, 504})
"""With these a right request may be turned away while a disturbance lasts."""


def judge(question: Question, outcome: Outcome, expected: Outcome, event: Event) -> str | None:
    """What is wrong with ``outcome`` beside ``event``, given the answer of one process; None if nothing is."""
    if outcome.end is End.HUNG:
        return f"no answer and no refusal within {outcome.seconds:.1f} s"
    if outcome.error.get("code") in NEVER:
        return f"an error that no disturbance explains: {outcome}"
    if (gap := _difference(outcome, expected)) is not None:
        return gap
    match outcome.end:
        case End.ANSWERED if outcome.prefill == "local":
            return "the decode node computed the prompt itself"
        case End.ANSWERED | End.ABORTED:
            return None
        case End.BROKEN:
            ended_decode = event.target == "decode" and event.kind in (Kind.KILL, Kind.TERMINATE)
            return None if ended_decode else f"the connection broke beside {event.kind} of {event.target}: {outcome}"
        case End.REFUSED if outcome.status == question.status:
            return None
        case End.REFUSED if outcome.status not in REFUSALS:
            return f"refused with a status that says nothing of the disturbance: {outcome}"
    return f"not answered beside {event.kind}, which should harm nobody: {outcome}" if event.kind in HARMLESS else None


def _difference(outcome: Outcome, expected: Outcome) -> str | None:
    """Where the tokens that came differ from the right ones."""
    for index, choice in outcome.choices.items():
        whole = expected.choices.get(index)
        if whole is None:
            return f"choice {index} is not among the {len(expected.choices)} expected ones"
        right = choice == whole if outcome.end is End.ANSWERED else choice.begins(whole)
        if not right:
            return f"wrong tokens in choice {index}: {choice}, expected {whole}"
    if outcome.end is End.ANSWERED and len(outcome.choices) != len(expected.choices):
        return f"{len(outcome.choices)} choices, expected {len(expected.choices)} (HTTP {expected.status})"
    return None

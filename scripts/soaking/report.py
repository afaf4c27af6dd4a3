"""What a run has seen, in numbers and findings."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.asking import Outcome

from soaking.plan import Event, Plan


@dataclass(frozen=True)
class Finding:
    """Something that must not happen: in which episode, beside what, to which room (None: not one room's fault)."""

    episode: int
    event: str
    room: int | None
    what: str


@dataclass
class Report:
    """What a run has seen so far."""

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    ends_by_event: dict[str, Counter[str]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    lives: dict[str, int] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefix: dict[str, int] = field(default_factory=dict)
    """What the nodes' caches did, all lives together, but for what a killed life did in its last episode."""
    n_answered_tokens: int = 0
    longest_s: float = 0.0
    longest_settle_s: float = 0.0
    elapsed_s: float = 0.0

    def count(self, event: Event, outcome: Outcome) -> None:
        self.ends[outcome.end] += 1
        self.ends_by_event.setdefault(event.kind, Counter())[outcome.end] += 1
        if outcome.error:
            self.codes[f"{outcome.status} {outcome.error.get('code')}"] += 1
        self.longest_s = max(self.longest_s, outcome.seconds)

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in ("plan", "findings")}
        plan: dict[str, Any] = {
            "seed": self.plan.seed,
            "rooms": self.plan.n_rooms,
            "rooms_played": self.ends.total(),
            "prefill_nodes": self.plan.prefill_nodes,
        }
        plan |= {"episodes": len(self.plan.episodes), "plan": self.plan.digest}
        return plan | fields | {"findings": [asdict(finding) for finding in self.findings]}

    @property
    def summary(self) -> str:
        """One paragraph."""
        plan, ends = self.plan, ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        return (
            f"seed {plan.seed} (plan {plan.digest}): {self.ends.total()} of {plan.n_rooms} rooms: {ends}; "
            f"{self.n_answered_tokens} tokens compared; prefixes: {self._prefixes}; the slowest client took "
            f"{self.longest_s:.1f} s, the slowest clean-up {self.longest_settle_s:.1f} s; lives {dict(self.lives)}; "
            f"{len(self.findings)} findings; {self.elapsed_s:.0f} s"
        )

    @property
    def _prefixes(self) -> str:
        return ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in self.prefix.items())

"""What a forward may run, and in which order: the sites of a function between its branches, loops and calls.

From this alone is decided how often an op can have run when a site is reached, and so whether a call of it can be told
apart where it stands in the source, or has to be counted as the forward runs.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Certainty = Literal["yes", "maybe", "no"]


@dataclass(frozen=True)
class Site:
    """One expression of a forward that an op or a child call is written in."""

    node: int  # the number of its node in the tree of the function
    name: str | None  # None: only the callee can tell, when it runs
    prefix: str  # where only the callee can tell: the attribute of the module that it comes from, "" for any
    tail: str | None  # where only the callee can tell: the last part of its path, or the name of the method
    kind: Literal["op", "child"]
    sure: bool  # its value cannot be a plain number
    source: str
    text: str

    def is_named(self, name: str) -> Certainty:
        if self.name is not None:
            return "yes" if self.name == name else "no"
        if self.tail is not None and name.rpartition(".")[2] != self.tail:
            return "no"
        if self.prefix and name != self.tail and name.partition(".")[0] != self.prefix:
            return "no"
        return "maybe"


@dataclass(frozen=True)
class Enter:
    """A function of the same forward is called, or handed over (``loose``: for others to call, nobody knows when)."""

    unit: Any
    loose: bool = False


@dataclass(frozen=True)
class Branch:
    """One of several ways."""

    options: "tuple[Flow, ...]"
    condition: ast.expr | None = None  # of the first option, where there are two


@dataclass(frozen=True)
class Loop:
    """A body that runs any number of times."""

    body: "Flow"


@dataclass(frozen=True)
class Loose:
    """The body of a nested function: it may run at any time, any number of times."""

    body: "Flow"


@dataclass(frozen=True)
class Attempt:
    """A body that may stop anywhere and go on in a handler."""

    body: "Flow"
    handlers: "tuple[Flow, ...]"
    otherwise: "Flow"


@dataclass(frozen=True)
class Leave:
    """A return (``whole``) or a raise."""

    returns: bool


Flow = list[Any]
Span = tuple[float, float]  # the least and the most
Weight = Callable[[Site], Span]


@dataclass
class Count:
    """How often a name can have run before each site, and by the end of the forward."""

    before: dict[Site, Span] = field(default_factory=dict)
    total: Span = (0, 0)
    loose: bool = False  # some of it runs nobody knows when


def count(unit: Any, weight: Weight) -> Count:
    """Count a name through a function and all that it calls."""
    result = Count()
    summary = _Counter(weight, result).unit(unit)
    result.before = dict(summary.before)
    result.total = summary.total or (0, 0)
    return result


@dataclass
class _Summary:
    before: dict[Site, Span] = field(default_factory=dict)
    total: Span | None = None


class _Counter:
    def __init__(self, weight: Weight, result: Count) -> None:
        self.weight, self.result = weight, result
        self.summaries: dict[int, _Summary | None] = {}
        self.current = _Summary()
        self.exits: list[Span] = []

    def unit(self, unit: Any) -> _Summary:
        done = self.summaries.get(id(unit))
        if done is not None:
            return done
        if id(unit) in self.summaries:  # recursion
            if self.most(unit.flow, set()):
                self.result.loose = True
            return _Summary({}, (0, 0))
        self.summaries[id(unit)] = None
        outer, self.current, outer_exits, self.exits = self.current, _Summary(), self.exits, []
        end = self.run(unit.flow, (0, 0))
        summary, exits = self.current, self.exits + ([end] if end else [])
        self.current, self.exits = outer, outer_exits
        summary.total = _join(exits)
        self.summaries[id(unit)] = summary
        return summary

    def run(self, flow: Flow, state: Span | None) -> Span | None:
        for step in flow:
            if state is None:
                break  # not reached
            state = self.step(step, state)
        return state

    def step(self, step: Any, state: Span) -> Span | None:
        if isinstance(step, Site):
            self.see(step, state)
            low, high = self.weight(step)
            return state[0] + low, state[1] + high
        if isinstance(step, Enter):
            if step.loose:
                return self.step(Loose(step.unit.flow), state)
            summary = self.unit(step.unit)
            for site, (low, high) in summary.before.items():
                self.see(site, (state[0] + low, state[1] + high))
            return None if summary.total is None else (state[0] + summary.total[0], state[1] + summary.total[1])
        if isinstance(step, Branch):
            return _join([end for option in step.options if (end := self.run(option, state)) is not None])
        if isinstance(step, Loop):
            if self.most(step.body, set()):
                state = (state[0], math.inf)
            self.run(step.body, state)
            return state
        if isinstance(step, Loose):
            if self.most(step.body, set()):
                self.result.loose = True
            self.run(step.body, state)
            return state
        if isinstance(step, Attempt):
            end = self.run([*step.body, *step.otherwise], state)
            failed = (state[0], state[1] + self.most(step.body, set()))
            return _join([s for s in (end, *(self.run(h, failed) for h in step.handlers)) if s is not None])
        if step.returns:
            self.exits.append(state)
        return None

    def see(self, site: Site, state: Span) -> None:
        known = self.current.before.get(site, state)
        self.current.before[site] = (min(known[0], state[0]), max(known[1], state[1]))

    def most(self, flow: Flow, seen: set[int]) -> float:
        """The most that a flow can add, whatever its branches."""
        total: float = 0
        for step in flow:
            if isinstance(step, Site):
                total += self.weight(step)[1]
            elif isinstance(step, Enter):
                if id(step.unit) not in seen:
                    total += self.most(step.unit.flow, seen | {id(step.unit)})
            elif isinstance(step, Branch):
                total += max(self.most(option, seen) for option in step.options)
            elif isinstance(step, Loop | Loose):
                total += math.inf if self.most(step.body, seen) else 0
            elif isinstance(step, Attempt):
                total += sum(self.most(part, seen) for part in (step.body, step.otherwise, *step.handlers))
        return total


def _join(spans: list[Span]) -> Span | None:
    return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None


def in_order(unit: Any, decide: Callable[[Any, ast.expr], bool | None]) -> list[tuple[Site, bool]]:
    """The sites in the order of the source, one round of every loop, calls written out.

    Every branch, unless ``decide`` knows how the condition of a function turns out. With each site goes whether it is
    certain to run, once, where it stands.
    """
    found: list[tuple[Site, bool]] = []

    def visit(owner: Any, flow: Flow, opened: tuple[int, ...], certain: bool) -> bool:
        """Whether the flow surely leaves the function."""
        for step in flow:
            if isinstance(step, Site):
                found.append((step, certain))
            elif isinstance(step, Enter):
                if id(step.unit) not in opened:
                    visit(step.unit, step.unit.flow, (*opened, id(step.unit)), certain and not step.loose)
            elif isinstance(step, Branch):
                taken = decide(owner, step.condition) if step.condition is not None else None
                options = step.options if taken is None else [step.options[not taken]]
                left = [visit(owner, option, opened, certain and taken is not None) for option in options]
                if all(left):
                    return True
            elif isinstance(step, Loop | Loose):
                visit(owner, step.body, opened, False)
            elif isinstance(step, Attempt):
                for part in (step.body, *step.handlers, step.otherwise):
                    visit(owner, part, opened, False)
            else:
                return True
        return False

    visit(unit, unit.flow, (id(unit),), True)
    return found

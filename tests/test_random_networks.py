"""Random networks: an operator inserted at a place, against the same network with it written into the source."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from benchmarks._reference import fresh, mapped, same_output, scaled, step
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from networks import WIDTH, Line, Network, networks
from torch import Tensor, nn

import gradsurgery as gs

QUIET = settings(derandomize=True, deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))


@dataclasses.dataclass(frozen=True)
class Kind:
    """An operation: how the package inserts it, and how this file writes it."""

    insert: Callable[..., nn.Module]
    by_hand: Callable[[Any], Any]


KINDS = {
    "reversal": Kind(lambda model, at, **o: gs.insert_grl(model, at, lambd=0.5, **o), lambda v: scaled(v, -0.5)),
    "scale": Kind(lambda model, at, **o: gs.insert_scale_gradient(model, at, 0.3, **o), lambda v: scaled(v, 0.3)),
    "stop": Kind(gs.insert_stop_gradient, lambda value: mapped(lambda x: fresh(x.detach()), value)),
}


def call(model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return model(x), {"x": x}


Mark = Callable[[str, int, Line], str | None]


def compare(network: Network, kind: Kind, at: str, mark: Mark, **options: Any) -> None:
    plain = network.build(lambda *_: None)
    reference = network.build(mark, kind.by_hand)
    subject = network.build(lambda *_: None)
    assert kind.insert(subject, at, **options) is subject
    for training in (True, False):
        untouched, right, got = (step(model, call, training) for model in (plain, reference, subject))
        assert same_output(right.output, untouched.output), "the network itself is drawn wrong"
        assert same_output(got.output, untouched.output)
        assert got.gradient_faults(right) == []
    gs.remove(subject)
    for training in (True, False):
        got, untouched = step(subject, call, training), step(plain, call, training)
        assert same_output(got.output, untouched.output)
        assert got.gradient_faults(untouched) == []


@QUIET
@given(networks(), st.sampled_from(sorted(KINDS)), st.sampled_from(["output", "input"]), st.data())
def test_module_boundaries(network: Network, kind: str, side: str, data: st.DataObject) -> None:
    calls = [("", line.module) for line in network.root.lines if line.module]
    if ("", "inner") in calls:
        calls += [("inner", line.module) for line in network.inner.lines if line.module]
    assume(calls)
    owner, name = data.draw(st.sampled_from(sorted(set(calls))))
    shared = network.shared and name == "lin"

    def mark(where: str, _index: int, line: Line) -> str | None:
        return side if line.module == name and (where == owner or shared) else None

    at = f"{owner}.{name}" if owner else name
    try:
        compare(network, KINDS[kind], at, mark, side=side)
    except gs.OperatorError:  # an operated copy would hide what is written to what is received
        assert (side, name) == ("input", "over"), "refused, though nothing is written to the input"


@QUIET
@given(networks(), st.sampled_from(sorted(KINDS)), st.booleans(), st.booleans(), st.data())
def test_ops(network: Network, kind: str, bare: bool, with_example: bool, data: st.DataObject) -> None:
    ops = [("", index) for index, line in enumerate(network.root.lines) if line.op]
    if any(line.module == "inner" for line in network.root.lines):
        ops += [("inner", index) for index, line in enumerate(network.inner.lines) if line.op]
    assume(ops)
    owner, index = data.draw(st.sampled_from(ops))
    body = network.inner if owner else network.root
    at = body.address(index, owner, bare)
    options = {"example": torch.randn(3, WIDTH)} if with_example else {}

    def mark(where: str, i: int, _line: Line) -> str | None:
        return "output" if (where, i) == (owner, index) else None

    try:
        compare(network, KINDS[kind], at, mark, **options)
    except gs.SurgeryError:
        assert not body.reads(index), "refused, though something reads the value"

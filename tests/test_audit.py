"""``gs.audit``: what it measures is what a hand computes, and nothing is left behind."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from core_helpers import Net, assert_untouched, seeded, snapshot
from test_cases import Codes, Domains, linear
from test_cases_stop import Skip
from torch import Tensor, nn

import gradsurgery as gs
from gradsurgery.listing import places_of

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


class Residual(nn.Module):
    """A residual branch with everything that a forward can change: statistics, random numbers, a plain counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.last = nn.Linear(4, 2)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        random.random()
        np.random.rand()
        x = self.first(x)
        return self.last(x + self.branch(x))


def gradients(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.manual_seed(0)
    loss(model(X)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def effects(audit: gs.Audit) -> dict[str, tuple[str, float | None]]:
    return {row.parameter: (row.effect, row.factor) for row in audit.rows}


def test_rows_are_what_a_hand_computes() -> None:
    model = seeded(Residual)
    plain = gradients(model, square)
    gs.insert_grl(model, "branch", lambd=0.5)
    operated = gradients(model, square)
    torch.manual_seed(0)
    audit = gs.audit(model, X, loss=square)
    assert audit.forward_identical
    assert audit.loss == audit.plain_loss
    assert {row.parameter for row in audit.rows} == plain.keys()
    for row in audit.rows:
        before, after = plain[row.parameter], operated[row.parameter]
        assert before is not None
        assert after is not None
        assert row.norm == pytest.approx(float(after.norm()), rel=1e-6)
        assert row.plain == pytest.approx(float(before.norm()), rel=1e-6)
        cosine = torch.nn.functional.cosine_similarity(before.flatten(), after.flatten(), dim=0)
        assert row.cosine == pytest.approx(float(cosine), abs=1e-4)
    for name in ("branch.0.weight", "branch.1.weight", "branch.1.bias"):
        assert (audit[name].effect, audit[name].factor, audit[name].exact) == ("reversed", -0.5, True)
    for name in ("last.weight", "last.bias"):
        assert (audit[name].effect, audit[name].factor, audit[name].exact) == ("unchanged", 1.0, True)
    assert (audit["first.weight"].effect, audit["first.weight"].factor) == ("mixed", None)
    with pytest.raises(KeyError):
        audit["nothing"]


def test_several_operators_multiply_and_a_factor_that_rounds_is_told_as_such() -> None:
    model = gs.insert_grl(seeded(), "blocks", lambd=0.3)
    gs.insert_scale_gradient(model, "stem", 2.0)
    audit = gs.audit(model, torch.randn(5, 3))
    assert audit["head.weight"].factor == 1.0
    assert audit["blocks.1.fc.weight"].factor == -0.3
    assert not audit["blocks.1.fc.weight"].exact
    assert audit["stem.weight"].factor == -0.6
    assert [(one.address, one.operator) for one in audit.operators] == [
        ("stem", "ScaleGradient(scale=2.0)"),
        ("blocks", "GradientReversal(lambd=0.3)"),
    ]


def test_rows_are_in_the_order_in_which_modules_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 2), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    audit = gs.audit(gs.insert_grl(Backwards(), "first"), X)
    assert [row.parameter for row in audit.rows] == ["first.weight", "first.bias", "last.weight", "last.bias"]


def failing(output: Tensor) -> Tensor:
    raise RuntimeError("the loss fails")


@pytest.mark.parametrize("loss", [square, failing, lambda output: output, None])
@pytest.mark.parametrize("measure", [gs.audit, gs.verify])
def test_nothing_is_left_behind(measure: Callable[..., gs.Audit], loss: Callable[[Tensor], Tensor] | None) -> None:
    model = seeded(Residual)
    gs.insert_grl(model, "branch")
    gs.insert_transform(model, "first", nn.BatchNorm1d(4), backward="frozen")
    x = X.clone().requires_grad_()
    outside = nn.Linear(2, 2)
    outside(model(x)).sum().backward()
    stops = []
    model.first.weight.register_post_accumulate_grad_hook(stops.append)  # as of an optimizer that steps in backward
    leaves = [x, *model.parameters(), *outside.parameters()]
    held = [(leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before, runs = snapshot(model), [operation.runs for operation in gs.operations(model)]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    try:
        measure(model, x, loss=loss and (lambda output: loss(outside(output))))
    except gs.SurgeryError:
        assert loss not in (square, None)
    else:
        assert loss in (square, None)
    assert_untouched(before, model)
    for leaf, (gradient, value) in zip(leaves, held, strict=True):
        assert leaf.grad is gradient
        assert (gradient is None and value is None) or torch.equal(gradient, value)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert [operation.runs for operation in gs.operations(model)] == runs
    assert stops == []
    assert model.training


def test_no_grad_and_inference_mode_around_it_do_not_matter() -> None:
    model = gs.insert_grl(seeded(), "stem")
    x = torch.randn(5, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert gs.audit(model, x.clone())["stem.weight"].effect == "reversed"


def test_an_input_that_hangs_on_another_model_sends_nothing_back() -> None:
    other, model = nn.Linear(3, 3), gs.insert_grl(seeded(), "stem")
    x = other(torch.randn(5, 3))
    gs.audit(model, x)
    assert other.weight.grad is None
    x.sum().backward()


def test_a_head_runs_with_its_operator_off_too_so_that_the_loss_is_the_same() -> None:
    model = seeded(Residual)
    head = nn.Linear(4, 3)

    def both(output: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return output[0].sum() + output[1]["domain"].square().sum()

    gs.attach_head(model, "first", head, operator=gs.GradientReversal(0.5), name="domain")
    audit = gs.audit(model, X, loss=both)
    assert audit.forward_identical
    found = effects(audit)
    assert found["domain.weight"] == found["last.weight"] == ("unchanged", 1.0)
    assert found["first.weight"] == ("mixed", None)
    assert [(one.address, one.side) for one in audit.operators] == [("first", "head")]
    with pytest.raises(gs.OperatorError, match="a function of exactly that"):
        gs.audit(model, X, loss=torch.sum)
    model.last.forward = failing
    with pytest.raises(gs.CaptureError, match="the loss fails"):
        gs.audit(model, X, loss=both)
    del model.last.forward
    assert not any(place.tap._armed for _, _, place in places_of(model))
    audit = gs.audit(model, X, loss=lambda output: output[1]["domain"].square().sum())
    assert effects(audit)["first.weight"] == ("reversed", -0.5)
    assert effects(audit)["last.weight"] == ("untouched", None)


# --- what public bug reports ask a report to show ---------------------------------------------------------------------


def test_b15_a_codebook_that_gets_no_gradient() -> None:
    model = gs.insert_transform(nn.Sequential(linear(0.8), linear(1.0)), "0", Codes())
    audit = gs.audit(model, torch.ones(1, 1))
    assert audit.blocked == ["0.gs_straight_through.fn.table"]
    assert "can no longer train: 0.gs_straight_through.fn.table" in str(audit)
    codes: Any = gs.operations(model)[0].operator.fn

    def with_codebook_loss(output: Tensor) -> Tensor:
        return output.sum() + (codes(torch.tensor([[0.8]])) - 0.8).square().sum()

    audit = gs.audit(model, torch.ones(1, 1), loss=with_codebook_loss)
    assert audit.blocked == []
    assert audit["0.gs_straight_through.fn.table"].norm == pytest.approx(0.4)


def test_b26_a_stop_on_a_skip_path_starves_its_only_layer() -> None:
    audit = gs.audit(gs.insert_stop_gradient(Skip(), "skip"), torch.ones(1, 1))
    assert audit.blocked == ["skip.weight"]
    assert effects(audit) == {"main.weight": ("unchanged", 1.0), "skip.weight": ("blocked", None)}


def test_b27_a_frozen_head_still_sends_its_loss_to_the_trunk() -> None:
    model = Domains()
    model.domain.requires_grad_(False)
    gs.insert_stop_gradient(model, "domain", side="input")
    audit = gs.audit(model, torch.ones(1, 1), loss=torch.sum)
    assert (audit["enc.weight"].plain, audit["enc.weight"].norm) == (8.0, 3.0)
    assert (audit["domain.weight"].effect, audit["domain.weight"].trains) == ("untouched", False)
    assert "untouched (frozen)" in str(audit)


def test_a_resnet_with_a_branch_that_is_zero_at_the_start() -> None:
    model = timm.create_model("resnet18")  # it begins with bn2.weight = 0, so the branches get zero gradients
    gs.insert_grl(model, "layer3")
    audit = gs.audit(model, torch.randn(2, 3, 64, 64))
    found = effects(audit)
    assert found["layer1.0.conv1.weight"] == ("zero", None)
    for name, effect in found.items():
        below = name.startswith(("conv1", "bn1", "layer1", "layer2", "layer3"))
        assert effect in [("zero", None), ("reversed", -1.0) if below else ("unchanged", 1.0)]
    lines = [line.split() for line in str(audit).splitlines()]
    assert ["layer3", "15", "reversed", "(8", "are", "zero)", "-1", "-1.000"] in [line[:8] for line in lines]
    assert not audit.blocked


# --- bad input --------------------------------------------------------------------------------------------------------


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LazyLinear(4)


BAD: dict[str, tuple[Callable[[], Any], type[gs.SurgeryError], list[str]]] = {
    "no operators": (lambda: gs.audit(Net(), X), gs.AddressError, ["nothing was inserted", "gs.insert_grl"]),
    "no scalar": (
        lambda: gs.audit(gs.insert_grl(Residual(), "first"), X, loss=lambda y: y),
        gs.OperatorError,
        ["scalar", "(8, 2)", ".mean()"],
    ),
    "no tensor": (
        lambda: gs.audit(gs.insert_grl(Residual(), "first"), X, loss=lambda y: y.sum().item()),
        gs.OperatorError,
        ["scalar", "a float", ".mean()"],
    ),
    "no parameter": (
        lambda: gs.audit(gs.insert_grl(Residual(), "first"), X, loss=lambda y: y.detach().sum()),
        gs.OperatorError,
        ["depends on no parameter", "none of the 8", "detached"],
    ),
    "all frozen": (
        lambda: gs.audit(gs.insert_grl(Residual().requires_grad_(False), "first"), X),
        gs.OperatorError,
        ["no parameter requires grad", "requires_grad"],
    ),
    "the model raises": (
        lambda: gs.audit(gs.insert_grl(Residual(), "first"), torch.ones(1, 7)),
        gs.CaptureError,
        ["RuntimeError", "inputs that the model takes"],
    ),
    "the loss raises": (
        lambda: gs.audit(gs.insert_grl(Residual(), "first"), X, loss=failing),
        gs.OperatorError,
        ["the loss fails", "(8, 2)", "function of exactly that"],
    ),
    "lazy": (
        lambda: gs.audit(gs.insert_grl(Lazy(), "head"), X),
        gs.CaptureError,
        ["stem.weight", "Run the model once"],
    ),
    "no module": (lambda: gs.audit({}, X), gs.SurgeryError, ["a dict"]),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, error, words = BAD[case]
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)

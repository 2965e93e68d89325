"""``gs.verify``: it passes what keeps its promise, says what it did not check, and catches what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from core_helpers import seeded
from test_audit import Residual, X, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgery as gs

FORWARD, HAND = "forward bit-identical", "gradient as by hand"


def results(audit: gs.Audit) -> dict[str, str]:
    return {check.promise: check.result for check in audit.checks}


@pytest.mark.parametrize("loss", [None, square])
@pytest.mark.parametrize(
    "operator",
    [gs.GradientReversal(), gs.GradientReversal(0.5), gs.ScaleGradient(-4.0), gs.ScaleGradient(0.0)],
    ids=repr,
)
def test_a_factor_with_a_way_around_it(operator: nn.Module, loss: Callable[[Tensor], Tensor] | None) -> None:
    audit = gs.verify(gs.insert(seeded(Residual), "branch.1", operator), X, loss=loss)
    formula, *_ = [check for check in audit.checks if check.promise.startswith("g(s)")]
    assert results(audit)[FORWARD] == "exact"
    # Only the two parameters at which two ways meet have a sum that rounds.
    assert formula.note in ("8 exact", "7 exact, 1 within rounding", "6 exact, 2 within rounding")


@pytest.mark.parametrize("factor", [0.3, 1e-4, 1 / 3])
def test_a_factor_that_rounds(factor: float) -> None:
    audit = gs.verify(gs.insert_scale_gradient(seeded(Residual), "first", factor), X)
    assert "within rounding" in results(audit).values()


@pytest.mark.parametrize(
    "operator",
    [
        gs.StopGradient(),
        gs.StraightThrough(torch.round),
        gs.StraightThrough(nn.Linear(4, 4)),
        gs.FrozenTransform(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))),
        gs.DetachedTransform(torch.sign),
        gs.MapGradient(lambda g: g.clamp(-0.01, 0.01)),
        gs.MapGradient(lambda g: g.mul_(3.0)),
    ],
    ids=["stop", "round", "module", "frozen", "detached", "clamp", "in place"],
)
@pytest.mark.parametrize("at", ["first", "branch", "branch.1", ":add"])
def test_every_other_operator_is_held_against_a_graph_cut_by_hand(operator: nn.Module, at: str) -> None:
    audit = gs.verify(gs.insert(seeded(Residual), at, operator), X)
    assert results(audit)[HAND] in ("exact", "within rounding")
    assert len(audit.checks) == 2


@pytest.mark.parametrize("operator", [gs.GradientReversal(), gs.StopGradient(), gs.MapGradient(torch.sign)], ids=repr)
def test_the_output_of_the_model_as_the_place(operator: nn.Module) -> None:
    audit = gs.verify(gs.insert(seeded(Residual), "", operator), X)
    assert set(results(audit).values()) == {"exact"}
    assert len(audit.blocked) == 8 * isinstance(operator, gs.StopGradient)


def test_the_operator_of_a_head() -> None:
    model = gs.attach_head(seeded(Residual), "first", nn.Linear(4, 3), operator=gs.GradientReversal(0.5), name="domain")
    audit = gs.verify(model, X, loss=lambda output: output[0].sum() + output[1]["domain"].square().sum())
    assert [(check.address, check.operator) for check in audit.checks] == [("first", "GradientReversal")] * 2
    assert audit.checks[1].result == "within rounding"
    model = gs.attach_head(seeded(Residual), "first", nn.Linear(4, 3), operator=Never(), name="domain")
    with pytest.raises(gs.VerificationError, match="s = -1"):
        gs.verify(model, X, loss=lambda output: output[1]["domain"].square().sum())


def test_several_operators_one_at_a_time() -> None:
    model = timm.create_model("resnet18", zero_init_last=False)
    gs.insert_grl(model, "layer3")
    gs.insert_stop_gradient(model, "layer1.0:add")
    gs.insert_scale_gradient(model, "layer2.1.conv2", 0.3)
    audit = gs.verify(model, torch.randn(2, 3, 32, 32))
    assert [check.address for check in audit.checks] == [
        *["layer1.0:add"] * 2,
        *["layer2.1.conv2"] * 2,
        *["layer3"] * 2,
        "all",
    ]
    assert [check.result for check in audit.checks] == [*["exact"] * 3, "within rounding", *["exact"] * 3]
    assert audit.forward_identical
    assert len(audit.blocked) == 9
    assert "g(s) = s g(1) + (1-s) g(0), s = -1" in str(audit)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        out, (hidden, _) = self.lstm(x)
        return out + hidden


@pytest.mark.parametrize(("at", "promise"), [("cell", HAND), ("lstm", HAND), ("lstm[0]", "g(s)"), (":tanh@1", "g(s)")])
def test_a_place_that_runs_several_times_or_holds_several_tensors(at: str, promise: str) -> None:
    audit = gs.verify(gs.insert_grl(seeded(Recurrent), at, lambd=0.5), X)
    assert audit.checks[1].promise.startswith(promise)
    assert audit.checks[1].result in ("exact", "within rounding")


@pytest.mark.parametrize(("at", "side"), [("branch", "input"), ("branch", "output"), ("first -> branch", "output")])
def test_inputs_and_edges(at: str, side: Any) -> None:
    assert "not checked" not in results(gs.verify(gs.insert_grl(seeded(Residual), at, side=side), X)).values()


class Checkpointed(Residual):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + checkpoint(self.branch, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    model: Any = seeded(Checkpointed)
    model.reentrant = reentrant
    gs.insert_grl(model, "branch.1", lambd=0.3)
    assert "not checked" not in results(gs.verify(model, X)).values()
    gs.remove(model)
    gs.insert(model, "branch.1", gs.MapGradient(torch.sign))
    audit = gs.verify(model, X)
    assert results(audit) == {FORWARD: "exact", HAND: "not checked"}
    assert "checkpointing" in audit.checks[1].note


def test_graph_modules_and_wrapped_models() -> None:
    class Plain(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x + self.branch(x))

    traced = gs.insert_grl(torch.fx.symbolic_trace(seeded(Plain)), "branch")
    compiled = gs.insert_grl(torch.compile(seeded(Plain), backend="eager"), "branch")
    for model in (traced, compiled):
        audit = gs.verify(model, X)
        assert "not checked" not in results(audit).values()
    assert audit.notes == ["the model inside the wrapper was run; compiled or distributed code was not"]


def test_what_is_not_checked_says_so() -> None:
    noisy = gs.MapGradient(lambda g: g + torch.randn_like(g))
    audit = gs.verify(gs.insert(seeded(Residual), "first", noisy), X)
    assert results(audit) == {FORWARD: "exact", HAND: "not checked"}
    audit = gs.verify(gs.insert(seeded(Residual), "first", nn.Tanh()), X)
    assert audit.checks[0].result == "not checked"
    assert "an operator of your own" in audit.checks[0].promise
    assert "changes the forward" in audit.checks[0].note
    model: Any = seeded(Residual)
    model.first.requires_grad_(False)
    audit = gs.verify(gs.insert_grl(model, "first"), X)
    assert "no gradient of a parameter passes here" in audit.checks[1].note
    model = timm.create_model("resnet18")  # its branches begin with bn2.weight = 0
    audit = gs.verify(gs.insert_grl(model, "layer3.0.conv1"), torch.randn(2, 3, 32, 32))
    assert audit.checks[1].result == "not checked"
    gs.insert_grl(gs.remove(model), "layer4")
    audit = gs.verify(model, torch.randn(2, 3, 32, 32))
    assert audit.checks[1].note == "30 exact, 32 zero or all rounding, not told"


# --- what is wrong ----------------------------------------------------------------------------------------------------


class Never(gs.GradientReversal):
    """Its author thinks that autograd calls a method of a module."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def backward(self, gradient: Tensor) -> Tensor:
        return -gradient


class NeverOfTheirOwn(nn.Module):
    forward, backward = Never.forward, Never.backward


class TooWeak(gs.ScaleGradient):
    def forward(self, x: Tensor) -> Tensor:
        return gs.scale_gradient(x, self.scale * (1 - 1e-3))


class OneBitOff(gs.GradientReversal):
    def forward(self, x: Tensor) -> Tensor:
        return gs.reverse_gradient(x * (1 + 2**-23), self.lambd)


class Leak(gs.StopGradient):
    def forward(self, x: Tensor) -> Tensor:
        return gs.scale_gradient(x, 0.0)


class Trained(gs.FrozenTransform):
    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Wrong(gs.StraightThrough):
    def forward(self, x: Tensor) -> Tensor:
        return gs.straight_through(x, torch.floor)


class Unclipped(gs.MapGradient):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


WRONG: list[tuple[nn.Module, list[str]]] = [
    (Never(), ["Never(lambd=1.0) at 'branch.1'", "s = -1", "factor 1, where -1 was due", "gs.operations"]),
    (NeverOfTheirOwn(), ["NeverOfTheirOwn", "method called backward", "autograd never calls", "gs.GradientReversal"]),
    (TooWeak(0.5), ["s = 0.5", "factor 0.4995, where 0.5 was due"]),
    (OneBitOff(), ["to the last bit", "The output differs by up to"]),
    (Leak(), ["gradient as by hand", "branch.0.weight: gradient one up to 0, where none was due"]),
    (Trained(nn.Linear(4, 4)), ["gs_trained.fn.weight: gradient one", "where none was due"]),
    (Wrong(torch.round), ["to leave the forward as promised"]),
    (Unclipped(torch.sign), ["gradient as by hand", "branch.1.weight"]),
]


@pytest.mark.parametrize(("operator", "words"), WRONG, ids=[type(operator).__name__ for operator, _ in WRONG])
def test_a_wrong_operator_is_caught(operator: nn.Module, words: list[str]) -> None:
    model = gs.insert(seeded(Residual), "branch.1", operator)
    with pytest.raises(gs.VerificationError) as caught:
        gs.verify(model, X)
    for word in words:
        assert word in str(caught.value)
    assert gs.operations(model)[0].operator is operator


def test_a_wrong_operator_among_right_ones_is_named() -> None:
    model = gs.insert(gs.insert_grl(seeded(Residual), "first"), "branch.0", Never())
    with pytest.raises(gs.VerificationError, match=r"^Never\(lambd=1.0\) at 'branch.0'"):
        gs.verify(model, X)


def test_a_reversal_that_was_lost_with_its_module() -> None:
    model: Any = gs.insert_grl(seeded(Residual), "branch.0")
    model.branch[0] = nn.Linear(4, 4)
    with pytest.raises(gs.VerificationError, match=r"GradientReversal at 'branch.0' was inserted and is lost"):
        gs.verify(model, X)
    model = gs.insert_grl(seeded(Residual), "branch")
    model.spare, model.branch = model.branch, nn.Linear(4, 4)
    with pytest.raises(gs.VerificationError, match=r"GradientReversal at 'branch' was inserted and is lost"):
        gs.verify(model, X)
    gs.remove(model, "branch")  # from the list alone: the operator itself is elsewhere
    with pytest.raises(gs.VerificationError, match=r"GradientReversal\(lambd=1.0\) at 'spare.*did not run"):
        gs.verify(model, X)
    assert any("did not run" in note for note in gs.audit(model, X).notes)


def test_a_kernel_that_is_not_reproducible_is_compared_up_to_rounding() -> None:
    class Shaky(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda g: g * (1 + 1e-6 * next(self.numbers)))
            return y

    model: Any = seeded(Shaky)
    model.numbers = iter(torch.rand(1000).tolist())
    gs.insert_grl(model, "branch.1", lambd=0.5)
    audit = gs.verify(model, X)
    assert results(audit)["g(s) = s g(1) + (1-s) g(0), s = -0.5"] == "within rounding"
    assert "compared up to rounding only" in str(audit)
    gs.remove(model)
    gs.insert(model, "branch.1", TooWeak(0.5))
    with pytest.raises(gs.VerificationError):
        gs.verify(model, X)

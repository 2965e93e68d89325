"""The package on timm and torchvision models, held against hand-written hooks; a slice of ``benchmarks/boundaries``."""

import copy
import io
import json
from collections.abc import Callable

import pytest
import torch
import torchvision
from benchmarks._operated import LAMBD, check, untouched
from benchmarks._reference import Call, Step, enliven, places, same_output, spread, step
from benchmarks.boundaries import SMALLEST, build, feeding, smallest_input
from torch import Tensor, nn

import gradsurgery as gs

SLICE = [
    "byobnet",
    "convnext",
    "efficientnet",
    "fasternet",
    "ghostnet",
    "levit",
    "mambaout",
    "maxxvit",
    "nfnet",
    "resnet",
    "starnet",
    "vision_transformer",
]


def exact(model: nn.Module, path: str, call: Call) -> None:
    assert check(model, path, call, untouched(model, call)) == []


@pytest.mark.parametrize("family", SLICE)
def test_boundaries_of_a_family(family: str) -> None:
    pristine = build(json.loads(SMALLEST.read_text())[family])
    call = feeding(smallest_input(pristine))
    plain = untouched(pristine, call)
    for path in spread(places(copy.deepcopy(pristine), call), 3, family):
        assert (path, check(pristine, path, call, plain)) == (path, [])


@pytest.mark.parametrize(
    ("fault", "insert"),
    [
        ("gradients differ", lambda model, at: gs.insert_grl(model, at, lambd=0.25)),
        ("gradients differ", lambda model, at: gs.insert_grl(model, "layer2", lambd=LAMBD)),
        ("forward differs", lambda model, at: gs.insert_transform(model, at, torch.tanh, backward="straight_through")),
    ],
)
def test_the_measure_finds_what_is_wrong(fault: str, insert: Callable[[nn.Module, str], object]) -> None:
    """The harness itself: a wrong strength, a wrong place and a moved forward must each be reported."""
    model, call = build("test_resnet"), feeding(64)
    found = check(model, "layer3", call, untouched(model, call), insert)
    assert any(fault in line for line in found), found


# --- neighbours that write in place ----------------------------------------------------------------------------------


def test_before_an_inplace_relu() -> None:
    model = build("resnet18")
    assert model.act1.inplace
    exact(model, "bn1", feeding(64))


def test_torchvision_densenet_features_before_a_functional_inplace_relu() -> None:
    exact(enliven(torchvision.models.densenet121(weights=None)), "features", feeding(64))


@pytest.mark.parametrize("path", ["layer2.0.bn2", "layer2.0.downsample", "layer2.0", "layer2.0.act2"])
def test_around_a_residual_that_adds_in_place(path: str) -> None:
    """Timm's BasicBlock: ``x += shortcut`` on what ``bn2`` gave, the shortcut of ``downsample`` or the block before."""
    exact(build("resnet18"), path, feeding(64))


# --- modules that are not called the usual way ------------------------------------------------------------------------


def test_a_forward_that_init_set_on_the_instance() -> None:
    model = build("fasternet_t0")
    path = next(name for name, module in model.named_modules() if type(module).__name__ == "Partial_conv3")
    assert "forward" in vars(model.get_submodule(path))
    exact(model, path, feeding(64))


@pytest.mark.parametrize(
    ("name", "path", "size"),
    [("resnet18", "layer3", 64), ("efficientnet_b0", "blocks", 64), ("test_vit", "blocks", 160)],
)
def test_a_sequential_under_timm_checkpointing(name: str, path: str, size: int) -> None:
    model = build(name)
    model.set_grad_checkpointing(True)
    exact(model, path, feeding(size))


WAYS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "forward_features": lambda model, image: model.forward_features(image),
    "forward_intermediates": lambda model, image: model.forward_intermediates(image),
    "intermediates_only": lambda model, image: model.forward_intermediates(image, intermediates_only=True),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("name", "path"),
    [("resnet18", "layer3"), ("efficientnet_b0", "blocks"), ("efficientnet_b0", "blocks.3"), ("test_vit", "blocks")],
)
def test_other_ways_through_the_model(name: str, path: str, way: str) -> None:
    size = 160 if name == "test_vit" else 64

    def call(model: nn.Module) -> tuple[object, dict[str, Tensor]]:
        image = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(5)).requires_grad_()
        return WAYS[way](model, image.clone()), {"image": image}

    exact(build(name), path, call)


# --- strides and converted forms --------------------------------------------------------------------------------------

CSATV2_AT = "stages.0.2"
"""A LayerNorm2d that gives, for a batch of one, strides which ``clone`` would not keep."""


def test_csatv2_in_eager_keeps_its_strides() -> None:
    model, call = build("csatv2"), feeding(128, batch=1)
    exact(model, CSATV2_AT, call)
    seen: list[tuple[int, ...]] = []
    model.stages[0][2].register_forward_hook(lambda _module, _args, output: seen.append(output.stride()))
    step(model, call, training=False)
    gs.insert_grl(model, CSATV2_AT, lambd=LAMBD)
    step(model, call, training=False)
    assert seen[0] == seen[1]


def _script(model: nn.Module, example: Tensor) -> nn.Module:
    return torch.jit.script(model)


def _script_and_load(model: nn.Module, example: Tensor) -> nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def _trace(model: nn.Module, example: Tensor) -> nn.Module:
    return torch.jit.trace(model, example, check_trace=False)


def _export(model: nn.Module, example: Tensor) -> nn.Module:
    return torch.export.export(model, (example,), strict=False).module()


def _export_strict(model: nn.Module, example: Tensor) -> nn.Module:
    return torch.export.export(model, (example,), strict=True).module()


def factors(got: Step, plain: Step) -> dict[str, float | None]:
    """What each gradient was multiplied by, where that is 1 or -0.5 exactly (but for the sign of a zero)."""
    found: dict[str, float | None] = {}
    for name, gradient in plain.gradients.items():
        assert gradient is not None
        mine = got.gradients[name]
        options = [factor for factor in (1.0, -LAMBD) if mine is not None and torch.equal(mine, gradient * factor)]
        found[name] = options[0] if len(options) == 1 else None
    return found


def above(model: nn.Module, path: str, call: Call) -> set[str]:
    """What loses its gradient when a hand-written hook detaches what leaves ``path``: all, on these two models."""
    place = copy.deepcopy(model)
    place.get_submodule(path).register_forward_hook(lambda _module, _args, output: output.detach())
    return {name for name, gradient in step(place, call, training=False).gradients.items() if gradient is None}


def _converted(model: nn.Module, form: Callable[[nn.Module, Tensor], nn.Module], call: Call, batch: int) -> Step:
    converted = form(model, torch.randn(batch, 3, 128, 128))
    output, inputs = call(converted)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in converted.named_parameters()}
    return Step(output.detach(), gradients | {f"<input>{name}": leaf.grad for name, leaf in inputs.items()}, {})


@pytest.mark.filterwarnings("ignore")  # TorchScript announces its own deprecation
@pytest.mark.parametrize(
    ("name", "path", "batch", "form"),
    [
        *[("csatv2", CSATV2_AT, 1, form) for form in (_script, _script_and_load, _trace, _export)],
        *[("resnet18", "layer3", 2, form) for form in (_script_and_load, _trace, _export, _export_strict)],
    ],
)
def test_converted_forms(name: str, path: str, batch: int, form: Callable[[nn.Module, Tensor], nn.Module]) -> None:
    """Against the untouched model in the same form: equal output, each upstream gradient times -0.5, the rest equal."""
    model, call = build(name).eval(), feeding(128, batch=batch)
    upstream = above(model, path, call)
    assert upstream
    operated = gs.insert_grl(copy.deepcopy(model).eval(), path, lambd=LAMBD)
    plain, got = _converted(model, form, call, batch), _converted(operated, form, call, batch)
    assert same_output(got.output, plain.output)
    assert factors(got, plain) == {name: -LAMBD if name in upstream else 1.0 for name in plain.gradients}


def test_places_that_follow_and_hold_each_other() -> None:
    """Four factors of -1 in a row: each parameter sees the product of those between it and the loss."""
    model, call = build("resnet18"), feeding(64)
    plain = step(copy.deepcopy(model), call, training=True)
    for path in ("layer1.1.bn1", "layer2", "layer3.0", "fc"):
        gs.insert_scale_gradient(model, path, -1.0)
    got = step(model, call, training=True)
    assert same_output(got.output, plain.output)
    signs = {
        "fc.weight": -1.0,
        "layer4.1.conv2.weight": -1.0,
        "layer3.1.conv1.weight": -1.0,
        "layer3.0.conv1.weight": 1.0,
        "layer2.1.bn2.weight": -1.0,
        "layer1.1.bn2.weight": -1.0,
        "layer1.1.conv1.weight": 1.0,
    }
    for name, sign in signs.items():
        assert torch.equal(got.gradients[name], plain.gradients[name] * sign), name  # type: ignore[operator]
    assert len(gs.operations(model)) == 4

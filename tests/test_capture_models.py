"""Real models: places of torchvision and timm against forwards written by hand, and the hard forwards, op by op."""

import inspect
import types

import pytest
import torch
from torch import nn

from gradsurgery.capture.record import list_ops, record_ops
from gradsurgery.capture.rewrite import OpEdit, rewrite
from gradsurgery.errors import CaptureError

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

pytestmark = pytest.mark.filterwarnings("error", "ignore::FutureWarning", "ignore::DeprecationWarning:timm")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def scaled(value, factor=4):
    if isinstance(value, torch.Tensor):
        return _Scale.apply(value, factor) if value.requires_grad else value
    return type(value)(scaled(item, factor) for item in value) if isinstance(value, tuple | list) else value


def edit(module, name, index=None, factor=4):
    cls, patched = type(module), module.__dict__.pop("forward", None)
    body = rewrite(cls, (OpEdit(name, index, "_gs_0"),), patched and patched.__func__)
    method = {"_gs_0": lambda self, value: scaled(value, factor), "_gs_base": cls}
    module.__class__ = type(cls.__name__, (cls,), {**body, **method})
    return body


def grads(model, x, training):
    model.train()  # some models keep biases from one eval forward to the next
    model.train(training).zero_grad(set_to_none=True)
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(first, second):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def twins(make, train=True):
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    return ours, make()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "index"), [("add", None), ("relu", 0), ("relu", 1), ("conv2", None)])
def test_torchvision_block(name, index, training):
    ours, theirs = twins(torchvision.models.resnet18)
    at = {(name, index or 0): scaled}

    def forward(self, x):
        def op(key, value):
            return at.get(key, lambda value: value)(value)

        out = op(("relu", 0), self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(op(("conv2", 0), self.conv2(out)))
        out += x
        return op(("relu", 1), self.relu(op(("add", 0), out)))

    theirs.layer1[0].forward = types.MethodType(forward, theirs.layer1[0])
    body = edit(ours.layer1[0], name, index)
    assert "_gs_count" not in inspect.getsource(body["forward"])
    x = torch.randn(2, 3, 64, 64)
    assert same(grads(ours, x, training), grads(theirs, x, training))


def test_torchvision_root():
    ours, theirs = twins(torchvision.models.resnet18)
    assert set(edit(ours, "flatten")) == {"forward", "_forward_impl"}
    theirs.avgpool.register_forward_hook(lambda module, args, out: scaled(out))
    x = torch.randn(2, 3, 64, 64)
    assert same(grads(ours, x, True), grads(theirs, x, True))
    scripted = torch.jit.script(edit_scriptable(torchvision.models.resnet18(), "flatten"))
    assert "_gs_0" in scripted.inlined_graph.str() or "_gs_0" in scripted._forward_impl.code


def edit_scriptable(model, name):
    def _gs_0(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2.0

    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {**rewrite(cls, (OpEdit(name, None, "_gs_0"),)), "_gs_0": _gs_0})
    return model


def test_vit():
    ours, theirs = twins(lambda: timm.create_model("vit_tiny_patch16_224", depth=2))
    x = torch.randn(2, 3, 224, 224)
    edit(ours.blocks[0], "add", 1)
    theirs.blocks[0].register_forward_hook(lambda module, args, out: scaled(out))
    assert same(grads(ours, x, True), grads(theirs, x, True))
    edit(ours.blocks[1].attn, "scaled_dot_product_attention")
    theirs.blocks[1].attn.register_forward_pre_hook(lambda module, args: None)
    theirs.blocks[1].attn.norm.register_forward_pre_hook(lambda module, args: scaled(args))
    assert same(grads(ours, x, True), grads(theirs, x, True))
    edit(ours, "cat")
    theirs.blocks.register_forward_pre_hook(lambda module, args: None)
    theirs.pos_drop.register_forward_pre_hook(lambda module, args: None)
    before = grads(theirs, x, True)
    after = grads(ours, x, True)
    prefix = [name for name, _ in ours.named_parameters()].index("patch_embed.proj.weight") + 2
    assert torch.equal(after[prefix], before[prefix] * 4)
    assert torch.equal(after[1], before[1] * 4)
    ours.set_grad_checkpointing(True)
    assert same(grads(ours, x, True), after)


def test_swin_helper():
    ours, theirs = twins(lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(2,), num_classes=3))
    block = ours.layers[0].blocks[1]
    x = torch.randn(1, 3, 224, 224)
    ops = [op for op in record_ops(ours, [block], (x,), {})[0] if "window" in op.text or op.name == "view"]
    assert ops
    edit(block, "view", 0)
    theirs.layers[0].blocks[1].norm1.register_forward_hook(lambda module, args, out: scaled(out))
    assert same(grads(ours, x, True), grads(theirs, x, True))


NAFLEX = {"embed_dim": 48, "depth": 1, "num_heads": 3}
HIERA = {"embed_dim": 24, "num_heads": 1, "stages": (1, 1, 1, 1)}
HARD = [
    ("convit_tiny", "GPSA", 224, {"depth": 2, "local_up_to_layer": 1}),
    ("efficientvit_b0", "LiteMLA", 96, {}),
    ("fasternet_t0", "Partial_conv3", 96, {}),
    ("hrnet_w18_small", "HighResolutionModule", 96, {}),
    ("test_vit", "Attention", 160, {}),
    ("twins_svt_small", "LocallyGroupedAttn", 224, {"depths": (1, 1, 1, 1)}),
    ("naflexvit_base_patch16_gap", "NaFlexVit", 96, NAFLEX),
    ("naflexvit_base_patch16_gap", "NaFlexEmbeds", 96, NAFLEX),
    ("hiera_tiny_224", "PatchEmbed", 224, HIERA),
    ("hiera_tiny_224", "Hiera", 224, HIERA),
]


@pytest.mark.parametrize(("name", "cls", "size", "options"), HARD)
def test_hard_forwards(name, cls, size, options):
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    x = torch.randn(1, 3, size, size)
    owner = next(m for m in model.modules() if type(m).__name__ == cls)
    plain = grads(model, x, False)
    base, patched = type(owner), owner.__dict__.get("forward")
    ops = record_ops(model, [owner], (x,), {})[0]
    assert len(ops) > 2
    assert type(owner) is base
    assert same(grads(model, x, False), plain)
    for op in ops[:: max(1, len(ops) // 6)]:
        edit(owner, op.name, op.index, factor=1)
        assert same(grads(model, x, False), plain), op
        owner.__class__ = base
        if patched is not None:
            owner.__dict__["forward"] = patched


def test_record_leaves_no_trace():
    model = torchvision.models.resnet18().train()
    calls = []
    model.layer1.register_forward_hook(lambda *args: calls.append(1))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    buffers = {key: id(value) for key, value in model.named_buffers()}
    classes = [type(module) for module in model.modules()]
    random = torch.get_rng_state()
    owners = list(model.modules())
    ops = record_ops(model, owners, (torch.randn(2, 3, 64, 64, generator=torch.Generator()),), {})
    assert {(op.name, op.shape) for op in ops[0] if op.kind == "op"} == {("flatten", (2, 512))}
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert {key: id(value) for key, value in model.named_buffers()} == buffers
    assert [type(module) for module in model.modules()] == classes and model.training
    assert torch.equal(random, torch.get_rng_state()) and calls == [1]
    assert not any("_gs" in key for module in model.modules() for key in module.__dict__)


def test_list_leaves_no_trace():
    model = timm.create_model("resnet18").train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    for module in model.modules():
        list_ops(module)
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_record_of_a_bad_example():
    model = torchvision.models.resnet18()
    with pytest.raises(CaptureError, match="during that run the model raised RuntimeError"):
        record_ops(model, [model.layer1], (torch.randn(2, 4, 64, 64),), {})
    assert type(model.layer1) is nn.Sequential


def test_record_of_what_does_not_run():
    model = torchvision.models.resnet18()
    model.spare = nn.Linear(2, 2)
    assert record_ops(model, [model.spare], (torch.randn(2, 3, 64, 64),), {}) == {0: []}

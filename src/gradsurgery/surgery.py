"""The way through the house: address -> capture -> edit -> graft, in one function for every operator."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from .edit import Insertion, commit, withdraw
from .errors import AddressError, OperatorError, SurgeryError
from .example import Arguments, Example, ops_on, read_example, run_on
from .ledger import record
from .methods import is_plain
from .operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
)
from .operators.coefficient import checked_factor, checked_lambd
from .place import Place, Target
from .resolve import At, resolve
from .scripted.names import resolve_compiled
from .scripted.surgery import insert_compiled
from .twin import twin
from .wrappers import bare, owns_parameters

__all__ = [
    "Wanted",
    "insert",
    "insert_grl",
    "insert_scale_gradient",
    "insert_stop_gradient",
    "insert_transform",
    "operate",
]

M = TypeVar("M", bound=nn.Module)
Side = Literal["output", "input"]


class Wanted(NamedTuple):
    """An operator that was asked for: ``make`` gives the one for the next place that ``at`` names."""

    at: At
    make: Callable[[], nn.Module]
    side: Side = "output"
    expect: int | None = None


def insert(
    model: M,
    at: At,
    operator: nn.Module,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Operate on the gradient, or the value, at every place that ``at`` names.

        gs.insert(model, "layer3", gs.ScaleGradient(0.1))
        gs.insert(model, nn.BatchNorm2d, gs.MapGradient(torch.nn.functional.normalize))

    The model keeps its identity: its class (a generated subclass of it that passes ``isinstance``), methods, hooks,
    parameters and ``state_dict`` keys. A place that has operators already gets the new one after them.

    Args:
        model: any ``nn.Module``, also compiled, wrapped in DDP or ``fully_shard``, or a ``torch.fx.GraphModule``.
        at: an address such as ``"layer3"``, ``"blocks.*.attn"``, ``"layer3.0:add"``, ``"lstm[0]"``,
            ``"layer3 -> layer4"``; a module type, a module of the model, a compiled pattern that matches whole module
            paths, a predicate ``(name, module) -> bool``, or a list of any of these. :func:`sites` lists the addresses.
        operator: one of this package, or any module that maps a tensor to a tensor. The same object serves every place.
        side: whether a module path means what the module returns, or what it receives.
        example: inputs to run the model on once, leaving no trace, to check that every place runs: a tensor, a tuple
            of positional arguments, or a pair ``(args, kwargs)``.
        expect: how many places there must be.
        inplace: False leaves the model alone and returns a twin that shares every parameter and buffer.

    Returns:
        The model, or its twin.

    Raises:
        AddressError: where ``at`` names no place, or not ``expect`` of them.
        CaptureError: where the forward that owns a place cannot be opened.
        OperatorError: where ``operator`` is not a module instance.
        SurgeryError: where the model cannot be operated on. The base of the three above.
    """
    return operate(model, [Wanted(at, lambda: operator, side, expect)], example, inplace)


def insert_grl(
    model: M,
    at: At,
    lambd: float = 1.0,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Reverse the gradient at a place: what lies before it climbs the loss that what lies after it descends.

        gs.insert_grl(model, "layer3")
        gs.insert_grl(model, "layer3", lambd=0.5, example=torch.randn(1, 3, 224, 224))

    The gradient reversal layer of Ganin and Lempitsky (2015, https://arxiv.org/abs/1409.7495): the identity forward,
    the gradient times ``-lambd`` backward. A layer after the place is not affected.

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        lambd: the strength, finite and not negative; set it later through ``operations(model)[0].operator.lambd``.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        OperatorError: where ``lambd`` is negative, not finite or not a number.
        SurgeryError: as in :func:`insert`.
    """
    checked_lambd(lambd, "GradientReversal")  # a wrong strength is the first thing to hear about
    return operate(model, [Wanted(at, lambda: GradientReversal(lambd), side, expect)], example, inplace)


def insert_scale_gradient(
    model: M,
    at: At,
    scale: float,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Multiply the gradient at a place by any finite number, and leave the forward as it is.

        gs.insert_scale_gradient(model, "backbone", 0.1)

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        scale: the factor. 0 gives gradients of zero, on which weight decay and momentum still act; for none at all
            see :func:`insert_stop_gradient`.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        OperatorError: where ``scale`` is not finite or not a number.
        SurgeryError: as in :func:`insert`.
    """
    checked_factor(scale, "ScaleGradient")
    return operate(model, [Wanted(at, lambda: ScaleGradient(scale), side, expect)], example, inplace)


def insert_stop_gradient(
    model: M,
    at: At,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Stop the gradient at a place: parameters before it that reach the loss only through it get ``grad`` None.

        gs.insert_stop_gradient(model, "layer2")

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        SurgeryError: as in :func:`insert`.
    """
    return operate(model, [Wanted(at, StopGradient, side, expect)], example, inplace)


def insert_transform(
    model: M,
    at: At,
    fn: Callable[[torch.Tensor], torch.Tensor],
    backward: Literal["straight_through", "frozen", "none"] = "straight_through",
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Replace the value at a place by ``fn`` of it, with a backward of your choice.

        gs.insert_transform(model, "layer2", torch.round)                          # quantise, gradient as if not
        gs.insert_transform(model, "layer2", denoiser, backward="frozen")          # gradient through, none for denoiser
        gs.insert_transform(model, "layer2", augment, backward="none")             # nothing flows back

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        fn: a function, or a module, whose parameters and buffers then become part of the model.
        backward: ``"straight_through"`` passes the gradient on as if ``fn`` were the identity (Bengio et al. 2013,
            https://arxiv.org/abs/1308.3432), and ``fn`` must keep the shape; ``"frozen"`` differentiates ``fn`` with
            respect to its input only; ``"none"`` cuts the gradient.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        OperatorError: where ``fn`` cannot be called, or at the forward where it breaks its promise.
        SurgeryError: as in :func:`insert`.
    """
    kinds = {"straight_through": StraightThrough, "frozen": FrozenTransform, "none": DetachedTransform}
    if backward not in kinds:
        raise SurgeryError(f"backward={backward!r} was asked for. It is one of {', '.join(map(repr, kinds))}.")
    operator = kinds[backward](fn)
    return operate(model, [Wanted(at, lambda: operator, side, expect)], example, inplace)


def operate(model: M, wanted: Sequence[Wanted], example: Example = None, inplace: bool = True) -> M:
    """Insert every operator that is wanted, in that order; where one place cannot be had, none is operated on."""
    root, arguments = bare(model), read_example(example)
    compiled = root if isinstance(root, torch.jit.ScriptModule) else None
    if compiled is not None and example is not None:
        raise SurgeryError(
            "example was given for a ScriptModule. Which modules its compiled code calls is known without a run, and a "
            "place that is not called is refused: leave example off."
        )
    ops = ops_on(root, arguments)
    batches: list[list[tuple[Target, nn.Module]]] = []
    for at, make, side, expect in wanted:
        if side not in ("output", "input"):
            raise SurgeryError(f"side={side!r} was asked for. It is 'output' or 'input'.")
        operator = make()
        check_operator(operator, model)
        named = resolve(root, at, side, ops) if compiled is None else resolve_compiled(compiled, at, side)
        expect_places(named, expect, at)
        _refuse_fused(root, named, operator)
        batches.append([(target, make() if k else operator) for k, target in enumerate(named)])
    if not inplace:
        _refuse_wrapper(model, root)
    if compiled is not None:
        operated = insert_compiled(compiled, batches, inplace)
        return model if inplace else operated  # type: ignore[return-value]
    found = [pair for batch in batches for pair in batch]
    if not inplace:
        model, copies = twin(model)
        found = [(dataclasses.replace(target, module=copies[id(target.module)]), one) for target, one in found]
        root = model
    targets = [target for target, _ in found]
    done = commit([Insertion(target, operator) for target, operator in found])
    if arguments is not None:
        try:
            _check_that_all_run(root, targets, done, arguments)
        except BaseException:
            withdraw(done)
            raise
    record(root, [(target, place) for target, (_, place) in zip(targets, done, strict=True)])
    return model


def _refuse_wrapper(model: nn.Module, root: nn.Module) -> None:
    if model is not root:
        raise SurgeryError(
            f"inplace=False was asked for a model in a {type(model).__name__}, which wraps one model only. "
            "Operate on the bare model with inplace=False and wrap the twin, or leave inplace=False off."
        )


def check_operator(operator: Any, model: nn.Module) -> None:
    """Refuse what is no module, and state that a wrapper would not train."""
    if not isinstance(operator, nn.Module):
        hint = f" (call it: {operator.__name__}(...))" if isinstance(operator, type) else ""
        raise OperatorError(
            f"the operator is {operator!r}, which is not an nn.Module instance{hint}. Give an operator such as "
            "gs.GradientReversal(0.5), or use gs.insert_transform(model, at, fn) for a function."
        )
    if is_plain(operator):
        return
    state = [name for name, _ in (*operator.named_parameters(), *operator.named_buffers())]
    if state and (wrapper := owns_parameters(model)):
        raise SurgeryError(
            f"the operator has parameters or buffers of its own ({', '.join(state[:3])}), and the model is in "
            f"{wrapper}, which has taken in its set of them already and would not train these. "
            "Insert it before wrapping the model."
        )


def expect_places(targets: list[Target], expect: int | None, at: At) -> None:
    """Refuse another number of places than was expected."""
    if expect is not None and (isinstance(expect, bool) or not isinstance(expect, int)):
        raise SurgeryError(f"expect={expect!r} was asked for. It is a number of places, an int.")
    if expect is not None and len(targets) != expect:
        there = ", ".join(repr(target.address) for target in targets[:8]) + (", ..." if len(targets) > 8 else "")
        raise AddressError(
            f"{at!r} was to name exactly {expect} place{'s' * (expect != 1)}; it names {len(targets)}: {there}. "
            "Change the address, or the number that is expected."
        )


def _check_that_all_run(
    root: nn.Module, targets: list[Target], done: list[tuple[nn.Module, Place]], arguments: Arguments
) -> None:
    run_on(root, arguments)
    idle = [target.address for target, (_, place) in zip(targets, done, strict=True) if not place.runs]
    for _, place in done:
        place.runs = 0
    if idle:
        raise AddressError(
            f"{', '.join(map(repr, idle))} never ran in the forward on the example, so an operator there would do "
            "nothing. gs.sites(model, example=...) lists what runs."
        )


def _refuse_fused(root: nn.Module, targets: list[Target], operator: nn.Module) -> None:
    """Refuse a change of values where ``nn.TransformerEncoderLayer`` computes with weights alone: in evaluation."""
    if is_plain(operator) or isinstance(operator, MapGradient) or not torch.backends.mha.get_fastpath_enabled():
        return
    for layer in root.modules():
        if not isinstance(layer, nn.TransformerEncoderLayer):
            continue
        inside = {id(module) for module in layer.modules()} - {id(layer)}
        for target in targets:
            if id(target.module) in inside or (target.module is layer and target.where.kind in ("op", "edge")):
                raise SurgeryError(
                    f"a {type(operator).__name__} was to be inserted at {target.address!r}, inside of an "
                    "nn.TransformerEncoderLayer, which in evaluation computes with the weights of its children and "
                    "calls none of them: the operator would be passed by. Switch that off first with "
                    "torch.backends.mha.set_fastpath_enabled(False), or operate on the output of the layer."
                )

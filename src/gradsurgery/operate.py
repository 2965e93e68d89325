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
from .operators import MapGradient
from .place import Place, Target
from .resolve import At, resolve
from .scripted.names import resolve_compiled
from .scripted.surgery import insert_compiled
from .twin import twin
from .wrappers import bare, owns_parameters

__all__ = ["Side", "Wanted", "check_operator", "expect_places", "operate"]

M = TypeVar("M", bound=nn.Module)
Side = Literal["output", "input"]


class Wanted(NamedTuple):
    """An operator that was asked for: ``make`` gives the one for the next place that ``at`` names."""

    at: At
    make: Callable[[], nn.Module]
    side: Side = "output"
    expect: int | None = None


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

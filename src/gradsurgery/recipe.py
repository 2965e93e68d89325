"""Operations as data: what was inserted where, as a dict that JSON can hold, and the same again on another instance.

A recipe may come from a stranger, so reading one never imports or calls anything that it names: a function of a
transform is in it by name alone, and whoever applies the recipe says which function that is.
"""

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn

from .errors import AddressError, OperatorError, SurgeryError
from .example import Example
from .listing import places_of
from .operate import Wanted, operate
from .operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
)
from .operators.coefficient import name_of
from .operators.live import LIVE_KINDS, RecordedTransform
from .recorded.place import RecordedPlace
from .tables import one_line
from .tap import HeadPlace, TapPlace
from .verify import refuse_lost
from .wrappers import bare

__all__ = ["apply", "recipe"]

M = TypeVar("M", bound=nn.Module)

FORMAT = 1

VALUES: dict[type[nn.Module], str | None] = {
    GradientReversal: "lambd",
    ScaleGradient: "scale",
    StopGradient: None,
    StraightThrough: "fn",
    FrozenTransform: "fn",
    DetachedTransform: "fn",
    MapGradient: "fn",
}
"""The one value that each operator is made from, by its name in a recipe."""

_BY_NAME = {operator.__name__: operator for operator in VALUES}


def recipe(model: nn.Module) -> dict[str, Any]:
    """What was inserted in a model, as plain data: to keep beside a checkpoint, to send, to repeat with :func:`apply`.

        json.dump(gs.recipe(model), open("operations.json", "w"))

    The dict holds strings, numbers, lists and dicts alone: the format, the version of this package, and the operations
    in the order of the model, each with its address, side, operator and value. A function of a transform is there as
    ``"module:name"``. Values are those of now: a schedule is at one point of its way.

    Args:
        model: the operated model, also through its wrapper.

    Raises:
        AddressError: where nothing was inserted.
        OperatorError: where an operator is no data: one of your own, or one whose function cannot be imported by name.
        SurgeryError: where there is a head, which has weights.
        VerificationError: where another tool has lost an operator.
    """
    root = bare(model)
    refuse_lost(root)
    steps: list[dict[str, Any]] = []
    places: set[int] = set()
    operators: dict[int, int] = {}
    for path, module, place in list(places_of(root)):  # held, so that each has an id of its own
        if isinstance(place, HeadPlace | TapPlace):
            raise SurgeryError(
                f"a recipe was asked for, but the model has the head {place.tap.name!r} at {place.tap.address!r}, and "
                f"a head has weights, which are no data. Take it off with gs.remove(model, {place.tap.address!r}), and "
                "attach it again with gs.attach_head after gs.apply."
            )
        if id(place) in places:  # under another name of a module that has two
            continue
        places.add(id(place))
        if isinstance(place, RecordedPlace) and not place.whole:
            raise SurgeryError(
                f"a recipe was asked for, but the operator at {place.where.text(path)!r} was recorded with the model "
                "and takes a part of what is there, such as an edge or one argument of several; an address would name "
                "it all. Take the recipe from the model that was exported."
            )
        step: dict[str, Any] = {"at": place.where.text(path)}
        if place.where.kind in ("output", "input"):
            step["side"] = place.where.kind
        operator = place.operator(module)
        first = operators.setdefault(id(operator), len(steps))
        step |= {"same_operator_as": first} if first < len(steps) else _described(operator, step["at"])
        steps.append(step)
    if not steps:
        raise AddressError(
            "a recipe was asked for, and nothing was inserted in this model. Insert first, with gs.insert_grl or "
            "another; if you did, it was in a copy or in the twin that inplace=False returned."
        )
    from . import __version__

    return {"format": FORMAT, "gradsurgery": __version__, "operations": steps}


def _described(operator: nn.Module, address: str) -> dict[str, Any]:
    if isinstance(operator, RecordedTransform):
        raise OperatorError(
            f"a recipe was asked for, but the {operator.kind.__name__} at {address!r} was recorded with the model: the "
            "ops of its function are there, and not which function that was. Take the recipe from the model that was "
            "exported."
        )
    kind = LIVE_KINDS.get(type(operator), type(operator))
    if kind not in VALUES:
        raise OperatorError(
            f"a recipe was asked for, but the operator at {address!r} is {one_line(operator)}, a class of your own, "
            f"which is no data. A recipe holds {', '.join(_BY_NAME)}. Remove it, and insert it again after gs.apply."
        )
    value = VALUES[kind]
    if value is None:
        return {"operator": kind.__name__}
    given = getattr(operator, value)
    return {"operator": kind.__name__, value: _importable(given, operator, address) if value == "fn" else given}


def _importable(fn: Any, operator: nn.Module, address: str) -> str:
    """The ``module:name`` under which a function is found again."""
    if not isinstance(fn, nn.Module):
        # What torch has compiled does not know under which public name it is found.
        for module in ("torch", "torch.nn.functional", getattr(fn, "__module__", None)):
            for name in (getattr(fn, "__qualname__", None), getattr(fn, "__name__", None)):
                if isinstance(module, str) and isinstance(name, str) and _found(module, name) is fn:
                    return f"{module}:{name}"
    what = "a module, whose weights are no data" if isinstance(fn, nn.Module) else "no function that a module holds"
    raise OperatorError(
        f"a recipe was asked for, but the {type(operator).__name__} at {address!r} has fn={name_of(fn)}, which is "
        f"{what}. Give it a function that is defined at the top of a module, not a lambda, a partial or a method; or "
        "remove it, and insert it again after gs.apply."
    )


def _found(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def apply(
    model: M,
    recipe: Mapping[str, Any],
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    example: Example = None,
    inplace: bool = True,
) -> M:
    """Repeat the operations of a recipe on another instance: all of them, or none.

        gs.apply(model, json.load(open("operations.json")))
        gs.apply(model, recipe, functions={"torch:round": torch.round})

    Nothing that a recipe names is imported or called, so one from a stranger can do no more than change gradients: a
    function is taken from ``functions``, and one that is not there is refused by name.

    Args:
        model: as in :func:`gradsurgery.insert`. What was inserted before stays, and acts first.
        recipe: what :func:`recipe` has returned.
        functions: for each name in the recipe the function that it stands for.
        example: as in :func:`gradsurgery.insert`; needed where the recipe has one of several calls of an op that only a
            run can tell apart.
        inplace: as in :func:`gradsurgery.insert`.

    Returns:
        The model, or its twin.

    Raises:
        AddressError: where a place is not there.
        OperatorError: where an operator, value or function is unknown.
        SurgeryError: where the recipe is malformed or of another format.
    """
    wanted: list[Wanted] = []
    steps = _steps(recipe)
    try:
        for step in steps:
            wanted.append(_wanted(step, wanted, functions or {}))
    except SurgeryError as error:
        raise type(error)(f"in operation {len(wanted)} of the recipe, {error}") from error
    return operate(model, wanted, example, inplace)


def _steps(recipe: Any) -> list[Any]:
    if not isinstance(recipe, Mapping):
        raise SurgeryError(
            f"the recipe is a {type(recipe).__name__}. Give the dict that gs.recipe(model) returned, read back with "
            "json.load where it was written to a file."
        )
    if not _is_int(recipe.get("format")):
        raise SurgeryError(
            f"the recipe is a dict of {_listed(recipe)}, without a number 'format'. "
            "Give what gs.recipe(model) returned."
        )
    if recipe["format"] != FORMAT:
        raise SurgeryError(
            f"the recipe has format {recipe['format']}, written by gradsurgery {recipe.get('gradsurgery', '?')}; this "
            f"version reads format {FORMAT}. Use the version that wrote it, or write it anew."
        )
    _only(recipe, {"format", "gradsurgery", "operations"}, "the recipe")
    steps = recipe.get("operations")
    if not isinstance(steps, list) or not steps:
        raise SurgeryError(f"the recipe has operations={steps!r:.80}. They are a list with at least one operation.")
    return steps


def _wanted(step: Any, before: list[Wanted], functions: Mapping[str, Any]) -> Wanted:
    if not isinstance(step, Mapping):
        raise SurgeryError(f"there is {step!r:.80}. It is a dict with 'at', 'side', 'operator' and a value.")
    at, side = step.get("at"), step.get("side", "output")
    shared: Any = step.get("same_operator_as")
    if not isinstance(at, str):
        raise SurgeryError(f"there is at={at!r:.80}. It is an address, a string such as 'layer3'.")
    if side not in ("output", "input"):
        raise SurgeryError(f"there is side={side!r:.80}. It is 'output' or 'input'.")
    if "same_operator_as" in step:
        if not _is_int(shared) or not 0 <= shared < len(before):
            raise SurgeryError(f"there is same_operator_as={shared!r:.80}. It is the number of an earlier operation.")
        _only(step, {"at", "side", "same_operator_as"}, "it")
        return Wanted(at, before[shared].make, side, 1)
    name = step.get("operator")
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise OperatorError(f"there is operator={name!r:.80}. The operators are {', '.join(_BY_NAME)}.")
    value = VALUES[kind]
    _only(step, {"at", "side", "operator", *([value] if value else [])}, f"a {name}")
    if value is None:
        operator = kind()
    elif value not in step:
        raise OperatorError(f"there is a {name} without {value!r}. Its value is needed.")
    else:
        operator = kind(_function(step[value], functions) if value == "fn" else step[value])
    return Wanted(at, lambda: operator, side, 1)


def _function(name: Any, functions: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in functions:
        raise OperatorError(
            f"there is the function {name!r:.80}, which a recipe has by name alone, and none of that name was given "
            f"({_listed(functions) or 'functions= is empty'}). Nothing is imported because a recipe says so: give "
            f"functions={{{name!r:.80}: ...}}."
        )
    return functions[name]


def _only(given: Mapping[str, Any], known: set[str], who: str) -> None:
    if unknown := [key for key in given if key not in known]:
        raise SurgeryError(
            f"{who} has {_listed(unknown)}, which means nothing here. What is known is {_listed(sorted(known))}; a "
            "later version may know more."
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(names: Any) -> str:
    return ", ".join(f"{name!r:.40}" for name in list(names)[:8])

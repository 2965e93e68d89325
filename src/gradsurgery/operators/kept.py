"""A function of the gradient in a recorded graph: an op of the dispatcher that knows the function by its name.

No chain of ops has a backward that is not linear in the gradient, so a graph of ops cannot hold ``map_gradient`` as
such. It can hold an op of ours, which every tracer records whole, and whose backward looks the function up by name. The
name is that of a function defined at the top of a module, as in a pickle; but nothing is imported for it. Only what has
been given to ``MapGradient`` or ``map_gradient`` in this process is found, so a file from a stranger runs no code that
is not here already. A name that has come to mean another function, as after a reload of its module, is refused: a
graph that was recorded before would go on with a function that it was not recorded with.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .._torch import constant_to_dynamo, is_forward
from ..errors import OperatorError
from .formula import exact_copy
from .shape import refuse_other_shape

__all__ = ["kept_name", "known", "map_by_name", "mapped_gradient"]

GradientFunction = Callable[[Tensor], Tensor]

_FUNCTIONS: dict[str, GradientFunction] = {}
_AMBIGUOUS: set[str] = set()


@constant_to_dynamo
def kept_name(fn: GradientFunction) -> str | None:
    """The name under which a graph can hold ``fn``, from now on known here; None where it has none.

    A lambda, a closure, a partial, a method and a module have none. Nor has a function of ``__main__``: in another
    process that is another file, which may have another function of this name; so is ``__mp_main__`` in a worker.
    """
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "." in name:
        return None
    if module in ("__main__", "__mp_main__"):
        return None
    if getattr(sys.modules.get(module), name, None) is not fn:
        return None
    key = f"{module}:{name}"
    if not _is_again(fn, _FUNCTIONS.setdefault(key, fn)):
        _AMBIGUOUS.add(key)
    _FUNCTIONS[key] = fn
    return key


def _is_again(fn: GradientFunction, before: GradientFunction) -> bool:
    """Whether ``fn`` is ``before``, or the same code once more, from a reload of its module."""
    if fn is before:
        return True
    if not isinstance(fn, FunctionType) or not isinstance(before, FunctionType):
        return False
    # What a decorator wraps lies in its closure, which does not tell.
    parts = (fn.__closure__, fn.__defaults__, fn.__kwdefaults__)
    return fn.__code__ == before.__code__ and not any(parts)


def known(name: str) -> GradientFunction:
    """The function that a graph means by this name."""
    fn = _FUNCTIONS.get(name)
    if fn is None:
        module, _, function = name.partition(":")
        raise OperatorError(
            f"A recorded graph asks for map_gradient with fn={name}, and no such function has been given to it in this "
            f"process. Import {module} and construct gradsurgery.MapGradient({module}.{function}) before the graph "
            "runs; or, if it is never trained, remove the operator before exporting."
        )
    if name in _AMBIGUOUS:
        raise OperatorError(
            f"A recorded graph asks for map_gradient with fn={name}, and two functions of that name have been given to "
            "it in this process, as after a reload of the module: which one the graph means cannot be told. Start a "
            "new process, or give the newer function a name of its own and record the graph with it."
        )
    return fn


def mapped_gradient(fn: GradientFunction, grad: Tensor) -> Tensor:
    """``fn`` of a gradient, wherever a backward comes to it."""
    # Autograd may hand this very tensor to another branch too, so an fn that works in place gets its own.
    new = fn(grad.clone())
    # Autograd would sum a larger gradient down to the shape in silence.
    refuse_other_shape("map_gradient", fn, grad, new)
    return new


@torch.library.custom_op("gradsurgery::map_gradient", mutates_args=())
def map_by_name(x: Tensor, fn: str) -> Tensor:
    """The value of ``x``, and in backward the function of this name, applied to the gradient."""
    known(fn)  # also where no gradient is asked for: a graph that trains wrongly later should not run now
    if is_forward():  # the dispatcher would drop the tangents in silence, and they would be zero from here on
        raise OperatorError(
            f"A recorded graph with map_gradient and fn={fn} was asked to push tangents forward (jvp, jacfwd, hessian, "
            "forward AD), where there is no gradient to map. Differentiate in reverse, or remove the operator before "
            "recording the graph."
        )
    return exact_copy(x)


@map_by_name.register_fake
def _(x: Tensor, fn: str) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.name = inputs[1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    return None if grad is None else mapped_gradient(known(ctx.name), grad), None


map_by_name.register_autograd(_backward, setup_context=_keep)

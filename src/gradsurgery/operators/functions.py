"""The public functions: each acts on a tensor, or on every tensor of a nested value."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..errors import OperatorError
from .coefficient import checked_factor, checked_fn, checked_lambd, name_of
from .formula import (
    is_differentiable,
    private_copy,
    replaced,
    scaled,
    scaled_by_formula,
    stopped,
    stopped_by_formula,
)
from .frozen import call_frozen
from .kept import kept_name, known
from .mapped import mapped
from .values import map_tensors

__all__ = [
    "detached_transform",
    "frozen_transform",
    "map_gradient",
    "map_gradient_by_name",
    "reverse_gradient",
    "scale_gradient",
    "stop_gradient",
    "straight_through",
]

if TYPE_CHECKING:
    Value = TypeVar("Value", bound=Any)
else:
    Value = Tensor  # TorchScript reads annotations when it compiles, and of the values accepted here it knows tensors


def reverse_gradient(x: Value, lambd: float = 1.0) -> Value:
    """Return ``x`` and multiply the gradient that comes back by ``-lambd``.

    What follows minimises the loss, what comes before maximises it: the layer of domain-adversarial training. The value
    is bit-identical and the gradient exactly ``-lambd * g``. ``lambd`` counts as it is at this call.

    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> reverse_gradient(x, 0.5).backward()
    >>> x.grad
    tensor([-0.5000])

    Args:
        x: a floating-point or complex tensor of any shape, or a tuple, list, dict, dataclass or registered pytree of
            them, nested at will, which comes back as the same type. Tensors of other dtypes and other leaves pass
            untouched. A tensor that occurs twice stays one tensor; two views of one memory become independent copies.
        lambd: the strength, a finite number >= 0 without unit: a python or numpy number, or a tensor of one element
            without grad.

    Raises:
        OperatorError: ``lambd`` is something else, or ``x`` holds tensors in a type that cannot be looked into.

    Ganin and Lempitsky, Unsupervised Domain Adaptation by Backpropagation, ICML 2015; Ganin et al., JMLR 17, 2016.
    """
    if not torch.jit.is_scripting():
        y = _operated(reverse_gradient, _reversed, checked_lambd, x, lambd)
    else:
        if not (lambd >= 0.0 and lambd < math.inf):
            raise OperatorError("lambd is a finite number >= 0; for other factors call scale_gradient.")
        y = scaled_by_formula(x, -lambd)
    return y


def scale_gradient(x: Value, scale: float) -> Value:
    """Return ``x`` and multiply the gradient that comes back by ``scale``.

    For multi-task training, where one loss should move a shared trunk less than its head. Zero gives zeros, which an
    optimizer with weight decay still acts on, and ``nan`` where the gradient is infinite; ``stop_gradient`` gives none.

    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> scale_gradient(x, 0.25).backward()
    >>> x.grad
    tensor([0.2500])

    Args:
        x: a tensor or a nested value, as for ``reverse_gradient``.
        scale: the factor, any finite real number without unit: a python or numpy number, or a tensor of one element
            without grad.

    Raises:
        OperatorError: ``scale`` is something else, or ``x`` holds tensors in a type that cannot be looked into.
    """
    if not torch.jit.is_scripting():
        y = _operated(scale_gradient, scaled, checked_factor, x, scale)
    else:
        if not (scale > -math.inf and scale < math.inf):
            raise OperatorError("scale is a finite number.")
        y = scaled_by_formula(x, scale)
    return y


def stop_gradient(x: Value) -> Value:
    """Return ``x`` without its history, so that nothing upstream gets a gradient through it.

    For the target branch of self-supervised training, or a head that must not move its trunk. Upstream ``grad`` stays
    ``None`` (not zeros). Unlike ``x.detach()`` the value has memory of its own: an in-place consumer cannot change
    ``x``.

    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> stop_gradient(x).requires_grad
    False

    Args:
        x: a tensor or a nested value, as for ``reverse_gradient``.

    Raises:
        OperatorError: ``x`` holds tensors in a type that cannot be looked into.

    Chen and He, Exploring Simple Siamese Representation Learning, CVPR 2021.
    """
    if not torch.jit.is_scripting():
        y = _spread(stop_gradient, stopped, x)
    else:
        y = stopped_by_formula(x)
    return y


def straight_through(x: Value, fn: Callable[..., Tensor]) -> Value:
    """Return ``fn(x)`` with the gradient of ``x`` itself, as if ``fn`` were not there.

    For quantisers, binarisation and codebooks, whose own derivative is zero or none. The value is exactly ``fn(x)``,
    not ``x + (fn(x) - x)``. ``fn`` runs without autograd, so its own parameters get no gradient here: give a codebook
    its loss on ``fn(x)``, not on this output.

    >>> x = torch.tensor([0.4, 1.6], requires_grad=True)
    >>> y = straight_through(x, torch.round)
    >>> y.sum().backward()
    >>> y.detach(), x.grad
    (tensor([0., 2.]), tensor([1., 1.]))

    Args:
        x: a tensor or a nested value, as for ``reverse_gradient``; ``fn`` is applied to each floating-point or complex
            tensor of it.
        fn: a function of one tensor that keeps its shape and device. The result is cast to the dtype of ``x``. It may
            work in place: what it is given is a copy.

    Raises:
        OperatorError: ``fn`` cannot be called or returned something that does not fit.

    Bengio, Leonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons, arXiv 1308.3432,
    2013.
    """
    return _operated(straight_through, _straight, checked_fn, x, fn)


def frozen_transform(x: Value, fn: Callable[..., Any]) -> Any:
    """Return ``fn(x)`` with its gradient to ``x``, and none to the parameters of ``fn``.

    For a fixed loss network, renderer or decoder that a gradient has to cross. The parameters keep ``requires_grad``,
    and other uses of them in the same graph keep their gradients. Buffers keep their values too: BatchNorm statistics
    stay as they are, in training mode as well.

    >>> layer, x = torch.nn.Linear(2, 3), torch.ones(1, 2, requires_grad=True)
    >>> frozen_transform(x, layer).sum().backward()
    >>> x.grad is not None, layer.weight.grad is None
    (True, True)

    Args:
        x: a tensor or a nested value, as for ``straight_through``.
        fn: an ``nn.Module``; or a function, whose modules are found where it is a bound method of one, or holds them in
            a ``functools.partial`` or a closure. The shape may change, and the result may be nested.

    Raises:
        OperatorError: ``fn`` cannot be called; or in eager, parameters would get a gradient all the same: they are read
            by other ways than these, or ``fn`` has activation checkpointing inside. A tool that records the ops
            cannot see this, so a function that reads bare parameters from a global or an object is the caller's matter.
    """
    return _operated(frozen_transform, _frozen, checked_fn, x, fn)


def detached_transform(x: Value, fn: Callable[..., Any]) -> Any:
    """Return ``fn(x)`` cut off from autograd: no gradient to ``x``, none to the parameters of ``fn``.

    For a transform that belongs to the data rather than to the model, such as a target encoder.

    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> detached_transform(x, torch.exp).requires_grad
    False

    Args:
        x: a tensor or a nested value, as for ``straight_through``.
        fn: a function of one tensor; the shape may change and the result may be nested. It may work in place: what it
            is given is a copy.

    Raises:
        OperatorError: ``fn`` cannot be called, or it returned tensors in a type that cannot be looked into.
    """
    return _operated(detached_transform, _detached, checked_fn, x, fn)


def map_gradient(x: Value, fn: Callable[[Tensor], Tensor]) -> Value:
    """Return ``x`` and hand the gradient ``g`` that comes back on as ``fn(g)``.

    For clipping, normalising or adding noise at one place of a network. A second backward differentiates through
    ``fn``.

    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> map_gradient(x, lambda g: g.clamp(max=0.1)).backward()
    >>> x.grad
    tensor([0.1000])

    Args:
        x: a tensor or a nested value, as for ``reverse_gradient``.
        fn: a function of one tensor that keeps its shape; it is called once in each backward, and may work in place.
            A function defined at the top of a module that can be imported is kept in what ``torch.export``,
            ``torch.jit``, ``torch.fx`` and ``make_fx`` record, by its name, as in a pickle. The file loads and trains
            where this package is imported and ``MapGradient(fn)`` has been constructed.

    Raises:
        OperatorError: ``fn`` cannot be called; in backward, when it returns another shape; when a graph is recorded and
            ``fn`` is a lambda, a closure, a method or of ``__main__``, which have no name that would hold; under
            forward AD (``jvp``, ``jacfwd``, ``hessian``), which has no gradient to map.
    """
    return _operated(map_gradient, mapped, checked_fn, x, fn)


def map_gradient_by_name(x: Value, name: str) -> Value:
    """``map_gradient`` in a graph of torch.fx or TorchScript, which holds names and no functions."""
    if not torch.jit.is_scripting():
        y = _spread(map_gradient_by_name, _mapped_by_name, x, name)
    else:
        y = x
        if is_differentiable(x):
            y = torch.ops.gradsurgery.map_gradient(x, name)
    return y


def _mapped_by_name(x: Tensor, name: str) -> Tensor:
    return mapped(x, known(name))


def _operated(
    public: Callable[..., Any], operate: Callable[..., Any], check: Callable[[Any, str], Any], x: Any, argument: Any
) -> Any:
    """Apply ``operate`` to the tensors of ``x`` with an argument that ``check`` accepts."""
    # In the hands of torch.fx the argument itself may be a Proxy.
    if not isinstance(argument, Tensor) and has_torch_function_unary(argument):
        return handle_torch_function(public, (argument,), x, argument)
    return _spread(public, operate, x, check(argument, public.__name__))


def _spread(public: Callable[..., Any], operate: Callable[..., Any], x: Any, *rest: Any) -> Any:
    """Apply ``operate`` to the tensors of ``x``; whoever overrides torch functions is shown ``public`` as one call."""
    if has_torch_function_unary(x):
        if isinstance(x, Proxy):
            if public is map_gradient and (name := kept_name(rest[0])) is not None:
                return map_gradient_by_name(x, name)
            _refuse_functions(public, rest)
        return handle_torch_function(public, (x,), x, *rest)
    if isinstance(x, Tensor):
        return operate(x, *rest)
    return map_tensors(lambda tensor: _spread(public, operate, tensor, *rest), x)


def _refuse_functions(public: Callable[..., Any], rest: tuple[Any, ...]) -> None:
    for fn in rest:
        if callable(fn) and not isinstance(fn, nn.Module):
            raise OperatorError(
                f"torch.fx was asked to record {public.__name__} with fn={name_of(fn)}. "
                "A graph holds modules of the model and numbers, not functions. "
                "Make fn an nn.Module of the model, or the operator a leaf module of the tracer."
            )


def _reversed(x: Tensor, lambd: float) -> Tensor:
    return scaled(x, -lambd)


def _straight(x: Tensor, fn: Callable[..., Tensor]) -> Tensor:
    if not is_differentiable(x):
        return x
    with torch.no_grad():
        value = fn(private_copy(x))
    return replaced(x, value, fn)


def _frozen(x: Tensor, fn: Callable[..., Any]) -> Any:
    return call_frozen(fn, x) if is_differentiable(x) else x


def _detached(x: Tensor, fn: Callable[..., Any]) -> Any:
    if not is_differentiable(x):
        return x
    with torch.no_grad():
        y = fn(private_copy(x))
    # fn may return a parameter, or work with gradients on.
    return stop_gradient(y)

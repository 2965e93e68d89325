"""The short way of the operators that only multiply the gradient: what Dynamo records of them, and asks as little.

Dynamo asks again at every call for all that the code on its way read: the type of each object and each attribute, and
for each method whether the instance shadows it. The way of eager reads dozens of such things, several times those of
the ops around it, and in compiled code on tiny tensors every one can be measured. So the short way is generated where
it is needed, and it calls nothing but one method that Dynamo takes for a constant.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import constant_to_dynamo
from ..capture.code import compile_function
from .functions import reverse_gradient, scale_gradient, stop_gradient

__all__ = ["ShortInGraphs", "short_way"]

# A layer's patched forward never comes here; an operator's at a place must be called, so the place has to ask. Dynamo
# guards what is read, not what is looked up: hence the second half of the question.
_SOURCE = """\
def {name}(self, x):
    operator = {operator}
    if "forward" not in operator.__dict__ and operator.forward is not None and {is_short}(x.__class__):
        if {is_short}(x.__class__, x.layout, x.dtype, x.is_nested):
            carrier = {carrier}
            if carrier.stride() == x.stride():
                cut = x.detach()
                carrier.detach().copy_(cut)
                return carrier
    return {otherwise}
"""
_NAMES = {fn.__name__: fn for fn in (reverse_gradient, scale_gradient, stop_gradient)}


def short_way(
    carrier: str, otherwise: str, name: str = "forward", operator: str = "self", is_short: str = "self._is_short"
) -> Callable[[nn.Module, Any], Any]:
    """A method that multiplies the gradient of plain tensors by the formula of ``scaled_by_formula``, written out.

    Args:
        carrier: an expression of ``operator`` and ``x``: a new tensor whose gradient is right, whatever its value.
        otherwise: an expression of ``self`` and ``x`` for all that is no plain tensor.
        name: of the method.
        operator: an expression of ``self``: the layer.
        is_short: the method that is asked about ``x``, as ``_is_short`` of a layer.
    """
    source = _SOURCE.format(name=name, operator=operator, is_short=is_short, carrier=carrier, otherwise=otherwise)
    return compile_function(source, name, _NAMES)


class ShortInGraphs(nn.Module):
    """Base of the layers that have a short way; each has the expression of its carrier as ``_carrier``."""

    _carrier = ""

    # No more is asked of torch functions: Dynamo finds them by the class alone, and records an active mode itself.
    @constant_to_dynamo
    def _is_short(
        self,
        kind: type,
        layout: torch.layout = torch.strided,
        dtype: torch.dtype = torch.float32,
        is_nested: bool = False,
    ) -> bool:
        """Whether values of this class may be plain tensors, and with the rest, whether one has gradients."""
        is_plain = (kind is Tensor or kind is nn.Parameter) and layout is torch.strided and not is_nested
        return is_plain and (dtype.is_floating_point or dtype.is_complex)

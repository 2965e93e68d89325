"""The short way of the layers with a coefficient: what Dynamo records of them, in as few questions as can be.

Dynamo asks again at every call for each name of a module and each attribute that the code on its way reads, but not for
the methods of a class. The way of eager reads dozens of such things, several times those of the ops around it, and in
compiled code on tiny tensors that can be measured.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .._torch import constant_to_dynamo

__all__ = ["ShortInGraphs"]


class ShortInGraphs(nn.Module):
    """Base of the layers that only multiply the gradient: the formula of ``scaled_by_formula`` for plain tensors."""

    def short(self, x: Any) -> Tensor | None:
        """What ``forward`` gives where ``x`` is a plain tensor, for a graph that Dynamo records; otherwise None."""
        # No more is asked of torch functions: Dynamo finds them by the class alone, and records an active mode itself.
        if not self._is_tensor(x.__class__) or x.is_nested or not self._has_gradients(x.layout, x.dtype):
            return None
        carrier = self._carrier(x)
        if carrier.stride() != x.stride():
            return None
        cut = x.detach()
        carrier.detach().copy_(cut)
        return carrier

    def _carrier(self, x: Tensor) -> Tensor:
        """A new tensor whose gradient is right and whose value does not count."""
        raise NotImplementedError

    @constant_to_dynamo
    def _is_tensor(self, kind: type) -> bool:
        return kind is Tensor or kind is nn.Parameter

    @constant_to_dynamo
    def _has_gradients(self, layout: torch.layout, dtype: torch.dtype) -> bool:
        return layout is torch.strided and (dtype.is_floating_point or dtype.is_complex)

"""The operators on one tensor as a table: the name, the call, the factor of the gradient (None: no gradient)."""

import pytest

from gradsurgery.operators import (
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)

# name, the operator on a tensor, the factor of its gradient (None: no gradient)
OPERATORS = [
    ("reverse", lambda x: reverse_gradient(x, 0.5), -0.5),
    ("scale", lambda x: scale_gradient(x, 0.25), 0.25),
    ("scale negative", lambda x: scale_gradient(x, -2), -2.0),
    ("scale zero", lambda x: scale_gradient(x, 0.0), 0.0),
    ("stop", stop_gradient, None),
    ("map", lambda x: map_gradient(x, lambda g: g * -4.0), -4.0),
    ("straight", lambda x: straight_through(x, lambda v: v), 1.0),
]


each_operator = pytest.mark.parametrize(
    ("operate", "factor"), [o[1:] for o in OPERATORS], ids=[o[0] for o in OPERATORS]
)

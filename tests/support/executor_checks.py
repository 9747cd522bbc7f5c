"""What tests of plans share: results of the reference executor agree to the rounding of the sums that they are."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from eqaccel.families.tensor_product import Plan, TensorProductSpec, execute
from eqaccel.testing import ERROR_CONSTANT

SPECS = {
    "mp0": TensorProductSpec.channelwise("8x0e+8x1o", "0e+1o+2e+3o", "8x0e+8x1o+8x2e+8x3o"),
    "ragged": TensorProductSpec.channelwise("33x0e+5x1o+1x2e", "0e+1o+2e", "33x0e+5x1o+1x2e"),
    "shared output": TensorProductSpec("4x0e+4x1o", "0e+1o", "4x1o", [(0, 1, 0, "uvu", True), (1, 0, 0, "uvu", False)]),
}

ROUNDING = ERROR_CONSTANT * sys.float_info.epsilon
"""Error of a sum in float64, relative to the sum of the absolute values of its terms."""


def sums_agree(value: Any, expected: Any, scale: Any) -> bool:
    """Whether two sums in float64 differ by the rounding of both, of terms whose absolute values add up to `scale`."""
    return bool((np.abs(value - expected) <= 2 * ROUNDING * scale).all())


def assert_computes_the_same(plan: Plan, expected: Plan, **operands: Any) -> None:
    """Asserts that both plans give the same outputs but for rounding."""
    found, wanted = (vars(execute(one, **operands)) for one in (plan, expected))
    scales = vars(execute(expected, **operands, absolute=True))
    for name, value in wanted.items():
        assert (found[name] is None) == (value is None)
        if value is not None:
            assert sums_agree(found[name], value, scales[name]), name

"""The kernels of a radial network: its numbers, for the text of the prelude."""

from __future__ import annotations

from collections.abc import Sequence

from eqaccel.codegen import Direction
from eqaccel.families.radial_network.spec import RadialNetworkSpec

THREADS = 128
"""Of a GPU block: four warps, each of which goes through the network with 16 rows at a time."""

RESIDENT = {Direction.FORWARD: 3, Direction.BACKWARD: 2}
"""Blocks of a multiprocessor, by the registers that a thread takes: of 64 features, 168 and 255."""


def print_radial_network(spec: RadialNetworkSpec) -> str:
    """The body of both directions; the prelude has the functions."""
    return f"""namespace {{
struct Problem {{
  static constexpr int layers = {spec.num_layers}, block_threads = {THREADS};
  static constexpr int resident = has_gradient ? {RESIDENT[Direction.BACKWARD]} : {RESIDENT[Direction.FORWARD]};
{_table("int", "width", spec.widths)}\
{_table("double", "factor", spec.factors)}\
{_table("double", "scale", spec.scales)}\
}};
static_assert(weights_before<Problem>(Problem::layers) * 2 == {spec.shared_bytes});
}}  // namespace
EQ_EXPORT_NETWORK(Problem)
"""


def _table(kind: str, name: str, numbers: Sequence[float]) -> str:
    values = ", ".join(map(repr, numbers))
    return f"""  static EQ_FN constexpr {kind} {name}(int n) {{
    constexpr {kind} all[] = {{{values}}};
    return all[n];
  }}
"""

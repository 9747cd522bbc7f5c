"""The kernels of a radial layer: its numbers, for the text of the prelude."""

from __future__ import annotations

from eqaccel.families.radial_layer.spec import RadialLayerSpec

LANE_OUTPUTS = 4
"""Columns of z of a GPU thread, that lie side by side."""


THREAD_ROWS = 16
"""Rows that threads go through with the same weights."""


def lanes_of_row(spec: RadialLayerSpec) -> int:
    """Threads of a GPU that share a row: a power of two, at most a warp."""
    threads = 1
    while threads < 32 and threads * LANE_OUTPUTS < spec.num_outputs:
        threads *= 2
    return threads


def print_radial_layer(spec: RadialLayerSpec) -> str:
    """The body of both directions; the prelude has the functions."""
    return f"""namespace {{
struct Problem {{
  static constexpr int inputs = {spec.num_inputs}, outputs = {spec.num_outputs}, lanes_of_row = {lanes_of_row(spec)};
  static constexpr int rows_of_thread = {THREAD_ROWS};
  static constexpr double factor = {spec.factor!r}, scale = {spec.scale!r};
}};
}}  // namespace
EQ_EXPORT_LAYER(Problem)
"""

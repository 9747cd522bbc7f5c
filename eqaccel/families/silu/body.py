"""The kernels of SiLU: its factors, for the text of the prelude."""

from __future__ import annotations

from eqaccel.families.silu.spec import SiluSpec


def print_silu(spec: SiluSpec) -> str:
    """The body of all directions; `silu.h` has the function."""
    return f"""namespace {{
struct Problem {{
  static constexpr double factor = {spec.factor!r}, scale = {spec.scale!r};
}};
}}  // namespace
EQ_EXPORT_ELEMENTS(Problem)
"""

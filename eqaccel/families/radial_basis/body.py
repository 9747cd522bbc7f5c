"""The kernels of radial basis functions: the numbers of the spec, for the text of the prelude."""

from __future__ import annotations

from eqaccel.families.radial_basis.spec import RadialBasisSpec


def print_radial_basis(spec: RadialBasisSpec) -> str:
    """The body of all directions; `radial_basis.h` has the functions."""
    return f"""namespace {{
struct Problem {{
  static constexpr int w_dim = {spec.num_basis}, z_dim = {spec.num_outputs}, power = {spec.power};
  static constexpr double r_max = {spec.r_max!r}, factor = {spec.factor!r}, unit = {spec.unit!r};
  static constexpr bool is_undefined_at_zero = {str(spec.is_undefined_at_zero).lower()};
}};
}}  // namespace
EQ_EXPORT_ROWS(Problem)
"""

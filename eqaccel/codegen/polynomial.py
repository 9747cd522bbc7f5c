"""The kernels of polynomials: straight-line code for a row, the same text for all backends and scalars."""

from __future__ import annotations

import functools
from itertools import groupby

import numpy as np

from eqaccel.codegen import check
from eqaccel.codegen.payload import abi_number, pack, read_prelude
from eqaccel.plan import Direction, execute_polynomial
from eqaccel.spec import MAX_POWER, PolynomialSpec, Term

_ROW_THREADS = 128


@functools.lru_cache(maxsize=64)
def polynomial_payload(spec: PolynomialSpec) -> tuple[bytes, int]:
    """The payload of a polynomial, and the integer key that names it; see `payload`.

    Meta has `row_threads`, the threads of a GPU block, of which each takes a row; entry `terms` has a line "<output>
    <weight> <feature> <feature> <feature> <coefficient>" for each term, with num_features for a feature that is not
    there.
    """
    gpu = ["gpu_lane.h", "gpu_polynomial.h"]
    preludes = {"cpu": ["cpu_lane.h", "cpu_polynomial.h"], "cuda": ["cuda.h", *gpu], "hip": ["hip.h", *gpu]}
    entries = {
        f"prelude/{backend}": "".join(map(read_prelude, ["abi.h", *names])) for backend, names in preludes.items()
    }
    x, w, z = spec.num_features, spec.num_weights, spec.num_outputs
    entries["check/blocks"] = f"x 1 {x}\nw 1 {w}\nz 1 {z}\n"
    for direction in Direction:
        body = print_polynomial(spec, direction)
        entries[f"cpu/{direction.value}"] = body
        entries[f"gpu/{direction.value}/float32"] = entries[f"gpu/{direction.value}/float64"] = body
        for name in (f"cpu/{direction.value}", f"gpu/{direction.value}/float32", f"gpu/{direction.value}/float64"):
            entries[f"plan/{name}"] = _explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
    padding = (x,) * MAX_POWER
    lines = (((t.output, t.weight, *(t.features + padding)[:MAX_POWER]), t.coefficient) for t in spec.terms)
    entries["terms"] = "".join(" ".join(map(str, numbers)) + f" {c!r}\n" for numbers, c in lines)
    meta = {"abi": abi_number(), "x_dim": x, "y_dim": 0, "w_dim": w, "z_dim": z, "row_threads": _ROW_THREADS}
    entries["meta"] = "".join(f"{key}={value}\n" for key, value in meta.items())
    return pack(entries)


def _explain(spec: PolynomialSpec, direction: Direction) -> str:
    return (
        f"{direction.value} of polynomials: {spec.num_outputs} outputs of {spec.num_features} features and "
        f"{spec.num_weights} weights, {len(spec.terms)} terms\n  a lane of a SIMD vector, or a thread of a GPU, takes "
        f"a row; blocks of {_ROW_THREADS} threads\n"
    )


def print_polynomial(spec: PolynomialSpec, direction: Direction) -> str:
    """The body of a direction: `run_row`, from the operands of a row, arrays of `V`, to its outputs.

    p<m>_<k> is what weight k is multiplied by in output m, v a product of two features and t one of three. In front of
    these, `d` stands for a tangent, `g` for a gradient of <gz, z> (in double backward, of <gz, dz>), and `gd` for the
    gradient with respect to a tangent.
    """
    dims = f"x_dim = {spec.num_features}, w_dim = {spec.num_weights}, z_dim = {spec.num_outputs}"
    lines = "".join(f"  {statement}\n" for statement in _Row(spec, direction).statements)
    return f"""namespace {{
struct Problem {{
  static constexpr int {dims};
}};
EQ_FN void run_row(const Row<Problem>& in, Row<Problem>& out) {{
  const V *x = in.x, *w = in.w, *gz = in.z, *a = in.dx, *c = in.dw;
{lines}}}
}}  // namespace
EQ_EXPORT_ROWS(Problem)
"""


class _Row:
    """The statements of a direction, in `statements`. A sum is declared by its first term."""

    def __init__(self, spec: PolynomialSpec, direction: Direction) -> None:
        self.statements: list[str] = []
        self._sums: set[str] = set()
        self.has_gradient = direction is not Direction.FORWARD
        self.has_tangent = direction is Direction.DOUBLE_BACKWARD
        if self.has_gradient:
            for m, k in sorted({(term.output, term.weight) for term in spec.terms}):
                if self.has_tangent:
                    self._let(f"gdp{m}_{k}", f"gz[{m}] * w[{k}]")
                self._let(f"gp{m}_{k}", f"gz[{m}] * {'c' if self.has_tangent else 'w'}[{k}]")
        # Terms are sorted, so that those with two features in common follow each other.
        for head, terms in groupby(spec.terms, key=lambda term: term.features[:2]):
            self._add_terms(head, list(terms))
        self._write(spec)

    def _let(self, name: str, value: str) -> None:
        self.statements.append(f"const V {name} = {value};")

    def _add(self, name: str, left: str, right: str | None = None) -> None:
        """Adds left * right, or left alone, to a sum."""
        if name not in self._sums:
            self._sums.add(name)
            self.statements.append(f"V {name} = {left if right is None else f'{left} * {right}'};")
        else:
            total = f"{name} + {left}" if right is None else f"fma({left}, {right}, {name})"
            self.statements.append(f"{name} = {total};")

    def _add_terms(self, head: tuple[int, ...], terms: list[Term]) -> None:
        """Terms that all begin with the features `head`: none, a single one, or two with or without a third."""
        if not head:
            self._add_products("(V{} + T(1))", "V{}", terms)
            return
        if len(head) == 1:
            self._add_products(f"x[{head[0]}]", f"a[{head[0]}]", terms)
            if self.has_gradient:
                self._add_coefficients(f"gx{head[0]}", "gp", terms)
            return
        i, j = head
        v = f"v{i}_{j}"
        self._let(v, f"x[{i}] * x[{j}]")
        if self.has_tangent:
            self._let(f"d{v}", f"fma(a[{i}], x[{j}], x[{i}] * a[{j}])")
        for features, same in groupby(terms, key=lambda term: term.features):
            if len(features) == 2:
                pairs = list(same)
                self._add_products(v, f"d{v}", pairs)
                if self.has_gradient:
                    self._add_coefficients(f"g{v}", "gp", pairs)
                if self.has_tangent:
                    self._add_coefficients(f"gd{v}", "gdp", pairs)
            else:
                self._add_cubes(v, f"t{i}_{j}_{features[2]}", features[2], list(same))
        if self.has_gradient:
            self._add(f"gx{i}", f"g{v}", f"x[{j}]")
            self._add(f"gx{j}", f"g{v}", f"x[{i}]")
        if self.has_tangent:
            self._add(f"gx{i}", f"gd{v}", f"a[{j}]")
            self._add(f"gx{j}", f"gd{v}", f"a[{i}]")

    def _add_cubes(self, v: str, t: str, third: int, terms: list[Term]) -> None:
        """Terms of the same three features, of which v is the product of two."""
        self._let(t, f"{v} * x[{third}]")
        if self.has_tangent:
            self._let(f"d{t}", f"fma(d{v}, x[{third}], {v} * a[{third}])")
        self._add_products(t, f"d{t}", terms)
        if self.has_gradient:
            self._add_coefficients(f"g{t}", "gp", terms)
            self._add(f"g{v}", f"g{t}", f"x[{third}]")
            self._add(f"gx{third}", f"g{t}", v)
        if self.has_tangent:
            self._add_coefficients(f"gd{t}", "gdp", terms)
            self._add(f"g{v}", f"gd{t}", f"a[{third}]")
            self._add(f"gd{v}", f"gd{t}", f"x[{third}]")
            self._add(f"gx{third}", f"gd{t}", f"d{v}")

    def _add_products(self, value: str, tangent: str, terms: list[Term]) -> None:
        for term in terms:
            self._add(f"p{term.output}_{term.weight}", f"T({term.coefficient!r})", value)
            if self.has_tangent:
                self._add(f"dp{term.output}_{term.weight}", f"T({term.coefficient!r})", tangent)

    def _add_coefficients(self, name: str, gradient: str, terms: list[Term]) -> None:
        for term in terms:
            self._add(name, f"T({term.coefficient!r})", f"{gradient}{term.output}_{term.weight}")

    def _write(self, spec: PolynomialSpec) -> None:
        weights, outputs = range(spec.num_weights), range(spec.num_outputs)
        d = "d" if self.has_tangent else ""
        if self.has_tangent or not self.has_gradient:
            for m in outputs:
                products = [(f"w[{k}]", f"{d}p{m}_{k}") for k in weights]
                products += [(f"c[{k}]", f"p{m}_{k}") for k in weights if self.has_tangent]
                self._write_sum(f"z[{m}]", products)
        if self.has_gradient:
            for i in range(spec.num_features):
                self.statements.append(f"out.x[{i}] = {f'gx{i}' if f'gx{i}' in self._sums else 'V{}'};")
            for k in weights:
                self._write_sum(f"w[{k}]", [(f"gz[{m}]", f"{d}p{m}_{k}") for m in outputs])

    def _write_sum(self, output: str, products: list[tuple[str, str]]) -> None:
        present = [f"{left} * {right}" for left, right in products if right in self._sums]
        self.statements.append(f"out.{output} = {' + '.join(present) or 'V{}'};")


def _checksums(spec: PolynomialSpec, direction: Direction) -> str:
    """As `check.checksums`, for a batch."""
    widths = {"x": spec.num_features, "w": spec.num_weights, "gz": spec.num_outputs}
    widths |= {"a": spec.num_features, "c": spec.num_weights}
    names = {Direction.FORWARD: ("x", "w"), Direction.BACKWARD: ("x", "w", "gz")}.get(direction, tuple(widths))
    operands = {name: check.numbers(name, check.BATCH_ROWS, widths[name]) for name in names}
    result, absolute = (execute_polynomial(spec, direction, **operands, absolute=flag) for flag in (False, True))
    lines = []
    for name in check.OUTPUTS[direction]:
        if name != "gy":
            size = float(np.sqrt((getattr(absolute, name) ** 2).sum()))
            a, b = (float(products.sum()) for products in check.projections(getattr(result, name)))
            lines.append(f"{name} {size:.4g} {a!r} {b!r}\n")
    return "".join(lines)

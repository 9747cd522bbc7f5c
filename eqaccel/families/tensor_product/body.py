"""The printer: a plan becomes one C++ body, written in terms of a lane value type.

The body is a struct for each segment with the multiply-adds of its paths, and a struct `Problem` with the dimensions,
the edge matrices and the list of segments. `T`, `Lane`, `Sum`, `fma`, `dot`, `read_entries` and `EQ_CHANNELS` get their
meaning from the backend's prelude, so the same text runs on SIMD vectors and on GPU threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from eqaccel.codegen import Direction
from eqaccel.families.tensor_product import units
from eqaccel.families.tensor_product.plan import Block, Element, KernelPlan, Part, Plan, PlannedPath, Segment
from eqaccel.families.tensor_product.plan.passes import rows_of
from eqaccel.families.tensor_product.spelling import spelling
from eqaccel.families.tensor_product.text import literal

_BlockPrinter = Callable[[KernelPlan, Segment, Block], Iterable[str]]


def print_code(plan: Plan) -> str:
    """A body without its launch: what is computed; it follows `Spelling.launch` of this plan, or of one like it."""
    lines = units.head(plan)
    for kernel in plan.kernels:
        lines += [
            "namespace {",
            f"namespace kernel{kernel.number} {{",
            "",
            *_kernel(kernel),
            "",
            "}",
            "}  // namespace",
            "",
        ]
        lines += spelling(plan).exports(kernel)
    if plan.kernels:
        lines += units.export(plan)
    return "\n".join([*lines, ""])


def _kernel(plan: KernelPlan) -> list[str]:
    spec = plan.spec
    printer = _forward_block if plan.direction is Direction.FORWARD else _gradient_block
    lines: list[str] = []
    for number, segment in enumerate(plan.segments):
        lines += _segment(plan, number, segment, printer)
    lines += [
        f"struct Problem {{  // {spec.irreps_in1} (x) {spec.irreps_in2} -> {spec.irreps_out}",
        f"  static constexpr int x_dim = {spec.x_dim}, y_dim = {spec.y_dim}, z_dim = {spec.z_dim}, "
        f"w_dim = {spec.weight_numel};",
        f"  static constexpr int entries = {plan.num_entries}, paths = {max(len(spec.paths), 1)}, "
        f"largest_mul = {max((s.mul for s in plan.segments), default=0)};",
    ]
    lines += spelling(plan).problem(plan)
    lines += ["  template <class F>", "  static EQ_FN void each_segment(const F& run) {"]
    lines += [f"    run(Segment{number}{{}});" for number in range(len(plan.segments))]
    return [*lines, "  }", "};"]


def _segment(plan: KernelPlan, number: int, segment: Segment, printer: _BlockPrinter) -> list[str]:
    lines = [
        f"struct Segment{number} {{  // {segment.mul} channels, {len(segment.paths)} paths",
        f"  static constexpr int mul = {segment.mul}, outputs = {len(segment.z_offsets)}, "
        f"lane_channels = {segment.channels_per_lane};",
        f"  using Lane = LaneOf<{segment.channels_per_lane}>;",
    ]
    lines += spelling(plan).segment(plan, number)
    if plan.direction is Direction.FORWARD:
        lines += [
            "  template <class X, class W>",
            "  static EQ_FN void edge(const X& x, const W& w, const T* entries, Lane* z) {",
        ]
    else:
        parameters = f"Rows& rows, {units.parameters(plan.direction)}"
        lines += ["  template <class Rows>", f"  static EQ_FN void edge({parameters}) {{"]
    if segment.unit:
        lines += [
            f"    eq_segment_{number}(&rows, {units.arguments(plan.direction)});",
            "  }",
            f"#if EQ_IN_UNIT({segment.unit})",
            "  template <class Rows>",
            f"  static EQ_FN void code({parameters}) {{",
        ]
    for block in segment.blocks:
        lines += [f"    {{  // {block.label}"]
        lines += [f"      {line}" for line in printer(plan, segment, block)]
        lines += ["    }"]
    return [*lines, "  }", *(["#endif"] if segment.unit else []), "};", ""]


def _forward_block(plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
    backend = spelling(plan)
    paths = [path for path in block.paths if plan.matrices[path.matrix].elements]  # the others' coefficients are zero
    if paths:
        yield from backend.read_x(plan, segment, block)
    for path in paths:
        matrix = plan.matrices[path.matrix]
        yield f"{{  // path {path.number}: {path.label}"
        yield f"  const auto m = {_read_entries(plan, path)};"
        weighted = path.weight_offset is not None
        if weighted:
            yield f"  const Lane wv = w.at({backend.streamed_w_at(plan, path)});"
        if path.weight_first or not weighted:
            started: set[int] = set()
            for element in matrix.elements:
                i, z = element.i, f"z[{path.accumulators[element.k]}]"
                if i not in started:
                    yield f"  const Lane u{i} = {f'wv * x{i}' if weighted else f'x{i}'};"
                    started.add(i)
                yield f"  {z} = fma({_entry(element)}, u{i}, {z});"
        else:
            for k in range(path.d3):
                row = [element for element in matrix.elements if element.k == k]
                if row:
                    z = f"z[{path.accumulators[k]}]"
                    total = _sum_of_products("t", ((_entry(e), f"x{e.i}") for e in row))
                    yield f"  {{ {total} {z} = fma(wv, t, {z}); }}"
        yield "}"


def _gradient_block(plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
    """The passes of a block; a path's weights are at hand from its first part to its last."""
    one_pass = _PASSES[plan.direction]
    started: set[int] = set()
    parts_left = Counter(part.path.number for parts in block.passes for part in parts)
    backend = spelling(plan)
    sizes = f"{block.d1}, {segment.mul}{backend.adds(block)}"
    yield f"auto xb = rows.template x_block<{sizes}>({backend.x_at(plan, block.x_offset)});"
    for parts in block.passes:
        weighted = [part.path for part in parts if part.path.weight_offset is not None]
        for path in weighted:
            if path.number not in started:
                yield f"auto w{path.number} = rows.template weight<{segment.mul}>({backend.w_at(plan, path)});"
        parts_left -= Counter(part.path.number for part in parts)
        yield "{"
        for part in parts:
            yield f"  // path {part.path.number}: {part.path.label}"
        gradients = ["", "b"][: plan.direction.gradients]
        sums = [f"{_sum(part, e, of)} = {{}}" for of in gradients for part in parts for e in part.elements]
        if sums:
            yield f"  Sum {', '.join(sums)};"
        yield f"  EQ_CHANNELS(c, {segment.mul}) {{"
        rows = sorted({i for part in parts for i in part.rows})
        yield from (f"    {line}" for line in one_pass(plan, segment, parts, rows))
        yield from (f"    xb.add({i}, c, d{i});" for i in rows)
        if plan.direction.gradients > 1:
            yield from (f"    xb.add_a({i}, c, da{i});" for i in rows)
        for path in weighted:
            n = path.number
            when = ", ".join(str(flag).lower() for flag in (n not in started, n not in parts_left))
            yield f"    w{n}.template add<{when}>(c, q{n});"
            if plan.direction.gradients > 1:
                yield f"    w{n}.template add_c<{when}>(c, qc{n});"
        yield "  }"
        yield from (f"  {line}" for part in parts for line in _fold(plan, part))
        yield "}"
        started |= {path.number for path in weighted}
        yield from (f"w{path.number}.flush();" for path in weighted if path.number not in parts_left)
    yield "xb.flush();"


def _backward_pass(plan: KernelPlan, segment: Segment, parts: Sequence[Part], rows: Sequence[int]) -> Iterable[str]:
    for i in rows:
        yield f"const Lane x{i} = xb.x({i}, c);"
    gx = _Sums("d")
    for part in parts:
        n, q = part.path.number, _Sums("q")
        weighted = part.path.weight_offset is not None
        yield from _part_head(plan, segment, part)
        if weighted:
            yield f"const Lane wv{n} = w{n}.at(c);"
        for i, row in rows_of(part.elements):
            yield _sum_of_products(f"t{n}_{i}", ((_entry(e, f"m{n}"), f"g{n}_{e.k}") for e in row))
            yield gx.add(i, f"wv{n}" if weighted else None, f"t{n}_{i}")
            yield f"const Lane u{n}_{i} = {f'wv{n} * x{i}' if weighted else f'x{i}'};"
            for e in row:
                yield f"{_sum(part, e)} = dot(u{n}_{i}, g{n}_{e.k}, {_sum(part, e)});"
            if weighted:
                yield q.add(n, f"x{i}", f"t{n}_{i}")


def _double_backward_pass(
    plan: KernelPlan, segment: Segment, parts: Sequence[Part], rows: Sequence[int]
) -> Iterable[str]:
    mul = segment.mul
    for i in rows:
        yield f"const Lane x{i} = xb.x({i}, c), a{i} = xb.a({i}, c);"
    gx = _Sums("d")
    for part in parts:
        path, n, q = part.path, part.path.number, _Sums("q")
        weighted = path.weight_offset is not None
        outputs = sorted({element.k for element in part.elements})
        yield from _part_head(plan, segment, part)
        if weighted:
            yield f"const Lane wv{n} = w{n}.at(c), cv{n} = w{n}.tangent(c);"
        for k in outputs:
            yield f"Lane z{n}_{k} = rows.template z<{mul}>({path.accumulators[k]}, {path.z_offset + k * mul}, c);"
        for i, row in rows_of(part.elements):
            if weighted:
                yield f"const Lane v{n}_{i} = fma(wv{n}, a{i}, cv{n} * x{i}), u{n}_{i} = wv{n} * x{i};"
            else:
                yield f"const Lane v{n}_{i} = a{i}, u{n}_{i} = x{i};"
            yield _sum_of_products(f"t{n}_{i}", ((_entry(e, f"m{n}"), f"g{n}_{e.k}") for e in row))
            yield _sum_of_products(f"r{n}_{i}", ((_entry(e, f"b{n}"), f"g{n}_{e.k}") for e in row))
            for e in row:
                z = f"z{n}_{e.k}"
                yield f"{z} = fma({_entry(e, f'b{n}')}, u{n}_{i}, fma({_entry(e, f'm{n}')}, v{n}_{i}, {z}));"
                yield f"{_sum(part, e)} = dot(v{n}_{i}, g{n}_{e.k}, {_sum(part, e)});"
            yield gx.add(i, f"wv{n}" if weighted else None, f"r{n}_{i}")
            if weighted:
                yield gx.add(i, f"cv{n}", f"t{n}_{i}")
                yield q.add(n, f"a{i}", f"t{n}_{i}")
                yield q.add(n, f"x{i}", f"r{n}_{i}")
        for k in outputs:
            yield f"rows.template set_z<{mul}>({path.accumulators[k]}, {path.z_offset + k * mul}, c, z{n}_{k});"


def _triple_backward_pass(
    plan: KernelPlan, segment: Segment, parts: Sequence[Part], rows: Sequence[int]
) -> Iterable[str]:
    """Second tangents follow one of the double backward's variables each, whose name they have with a d behind."""
    mul = segment.mul
    for i in rows:
        yield f"const Lane x{i} = xb.x({i}, c), a{i} = xb.a({i}, c), p{i} = xb.p({i}, c);"
    gx, ga = _Sums("d"), _Sums("da")
    for part in parts:
        path, n, gw, gc = part.path, part.path.number, _Sums("q"), _Sums("qc")
        weighted = path.weight_offset is not None
        outputs = sorted({element.k for element in part.elements})
        wv, cv, rv = (f"{name}{n}" if weighted else None for name in ("wv", "cv", "rv"))
        yield from _part_head(plan, segment, part)
        if weighted:
            yield f"const Lane {wv} = w{n}.at(c), {cv} = w{n}.tangent(c), {rv} = w{n}.second_tangent(c);"
        for k in outputs:
            yield f"Lane z{n}_{k} = rows.template z<{mul}>({path.accumulators[k]}, {path.z_offset + k * mul}, c);"
        for i, row in rows_of(part.elements):
            x, a, p, u, v, ud, vd, t, r, td, rd = (
                f"{name}{i}" if name in ("x", "a", "p") else f"{name}{n}_{i}"
                for name in ("x", "a", "p", "u", "v", "ud", "vd", "t", "r", "td", "rd")
            )
            if weighted:
                yield f"const Lane {u} = {wv} * {x}, {v} = fma({wv}, {a}, {cv} * {x});"
                yield f"const Lane {ud} = fma({wv}, {p}, {rv} * {x}), {vd} = fma({cv}, {p}, {rv} * {a});"
            else:
                yield f"const Lane {u} = {x}, {v} = {a}, {ud} = {p};"
            terms = [(_entry(e, f"m{n}"), _entry(e, f"b{n}"), _entry(e, f"e{n}"), e.k) for e in row]
            yield _sum_of_products(t, ((m, f"g{n}_{k}") for m, _, _, k in terms))
            yield _sum_of_products(r, ((b, f"g{n}_{k}") for _, b, _, k in terms))
            pairs = (((m, f"h{n}_{k}"), (d, f"g{n}_{k}")) for m, _, d, k in terms)
            yield _sum_of_products(td, (pair for both in pairs for pair in both))
            yield _sum_of_products(rd, ((b, f"h{n}_{k}") for _, b, _, k in terms))
            for e, (m, b, d, k) in zip(row, terms, strict=True):
                z, g, h, s, sb = f"z{n}_{k}", f"g{n}_{k}", f"h{n}_{k}", _sum(part, e), _sum(part, e, "b")
                yield f"{z} = fma({d}, {v}, fma({b}, {ud}, {z}));"
                if weighted:
                    yield f"{z} = fma({m}, {vd}, {z}); {s} = dot({vd}, {g}, {s});"
                yield f"{s} = dot({v}, {h}, {s}); {sb} = dot({u}, {h}, dot({ud}, {g}, {sb}));"
            yield gx.add(i, wv, rd)
            yield ga.add(i, wv, td)
            if weighted:
                yield from (gx.add(i, cv, td), gx.add(i, rv, r), ga.add(i, rv, t))
                yield from (gw.add(n, x, rd), gw.add(n, a, td), gw.add(n, p, r), gc.add(n, x, td), gc.add(n, p, t))
        for k in outputs:
            yield f"rows.template set_z<{mul}>({path.accumulators[k]}, {path.z_offset + k * mul}, c, z{n}_{k});"


_PASSES = {
    Direction.BACKWARD: _backward_pass,
    Direction.DOUBLE_BACKWARD: _double_backward_pass,
    Direction.TRIPLE_BACKWARD: _triple_backward_pass,
}


class _Sums:
    """Sums of products in variables of one letter, each declared by its first term."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.declared: set[int] = set()

    def add(self, number: int, left: str | None, right: str) -> str:
        """The statement that adds left * right, or right alone."""
        name = f"{self.letter}{number}"
        if number not in self.declared:
            self.declared.add(number)
            return f"Lane {name} = {right if left is None else f'{left} * {right}'};"
        return f"{name} = {f'{name} + {right}' if left is None else f'fma({left}, {right}, {name})'};"


def _part_head(plan: KernelPlan, segment: Segment, part: Part) -> Iterable[str]:
    """Edge matrices and gradients of the outputs that a part reads."""
    path, n = part.path, part.path.number
    if not part.elements:  # a coefficient of zero, and so is the gradient of its weights
        zeros = ["q", "qc"][: plan.direction.gradients] if path.weight_offset is not None else []
        yield from (f"const Lane {name}{n} = {{}};" for name in zeros)
        return
    yield f"const auto m{n} = {_read_entries(plan, path)};"
    for name, array in (("b", "entries_b"), ("e", "entries_q"))[: plan.direction.tangents - 1]:
        yield f"const auto {name}{n} = {_read_entries(plan, path, array)};"
    for k in sorted({element.k for element in part.elements}):
        where = f"<{segment.mul}>({path.accumulators[k]}, {path.z_offset + k * segment.mul}, c)"
        yield f"const Lane g{n}_{k} = rows.template g{where};"
        if plan.direction.gradients > 1:
            yield f"const Lane h{n}_{k} = rows.template tangent_g{where};"


def _sum(part: Part, element: Element, of: str = "") -> str:
    return f"s{of}{part.path.number}_{element.i}_{element.k}"


def _fold(plan: KernelPlan, part: Part) -> Iterable[str]:
    """The sums over channels, contracted with the CG tensor into the gradients of y and of its tangent b."""
    entries = plan.matrices[part.path.matrix].entries
    for element in part.elements:
        for j, factor in entries[element.entry]:
            for to, of in (("gy", ""), ("gb", "b"))[: plan.direction.gradients]:
                yield f"{to}[{j}] = fma({literal(element.sign * factor)}, {_sum(part, element, of)}, {to}[{j}]);"


def _sum_of_products(name: str, terms: Iterable[tuple[str, str]]) -> str:
    (left, right), *rest = terms
    return f"Lane {name} = {left} * {right};" + "".join(f" {name} = fma({a}, {b}, {name});" for a, b in rest)


def _entry(element: Element, array: str = "m") -> str:
    return f"{'-' if element.sign < 0 else ''}{array}[{element.entry}]"


def _read_entries(plan: KernelPlan, path: PlannedPath, array: str = "entries") -> str:
    return f"read_entries<{plan.first_entry[path.matrix]}, {len(plan.matrices[path.matrix].entries)}>({array})"

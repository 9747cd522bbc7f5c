"""The printer: a plan becomes one C++ body, written in terms of a lane value type.

The body is a struct for each segment with the multiply-adds of its paths, and a struct `Problem` with the dimensions,
the edge matrices and the list of segments. `T`, `Lane`, `Sum`, `fma`, `dot`, `read_entries` and `EQ_CHANNELS` get their
meaning from the backend's prelude, so the same text runs on SIMD vectors and on GPU threads.
"""

from __future__ import annotations

from collections.abc import Iterable

from eqaccel.irreps import Irreps
from eqaccel.plan import Block, Direction, EdgeMatrix, Element, KernelPlan, PlannedPath, Segment


def print_body(plan: KernelPlan) -> str:
    """The text of a plan's body.

    Args:
        plan: The plan of one direction on one target.

    Returns:
        C++ text that follows the prelude of the target's backend in a translation unit.
    """
    spec = plan.spec
    printer = {
        Direction.FORWARD: _forward_block,
        Direction.BACKWARD: _backward_block,
        Direction.DOUBLE_BACKWARD: _double_backward_block,
    }[plan.direction]
    lines = ["namespace {", ""]
    for number, segment in enumerate(plan.segments):
        lines += _segment(plan, number, segment, printer)
    lines += [
        f"struct Problem {{  // {spec.irreps_in1} (x) {spec.irreps_in2} -> {spec.irreps_out}",
        f"  static constexpr int x_dim = {spec.x_dim}, y_dim = {spec.y_dim}, z_dim = {spec.z_dim}, "
        f"w_dim = {spec.weight_numel};",
        f"  static constexpr int entries = {plan.num_entries}, paths = {max(len(spec.paths), 1)}, "
        f"largest_mul = {max((s.mul for s in plan.segments), default=0)};",
    ]
    lines += _gpu_tables(plan) if plan.target.is_gpu else _cpu_entries(plan)
    lines += _each_block("x", spec.irreps_in1) + _each_block("z", spec.irreps_out)
    lines += ["  template <class F>", "  static EQ_FN void each_segment(const F& run) {"]
    lines += [f"    run(Segment{number}{{}});" for number in range(len(plan.segments))]
    lines += ["  }", "};", "", "}  // namespace", "", "EQ_EXPORT(Problem)", ""]
    return "\n".join(lines)


def _segment(plan: KernelPlan, number: int, segment: Segment, printer) -> list[str]:
    offsets = ", ".join(map(str, segment.z_offsets))
    lines = [
        f"struct Segment{number} {{  // {segment.mul} channels, {len(segment.paths)} paths",
        f"  static constexpr int mul = {segment.mul}, outputs = {len(segment.z_offsets)}, "
        f"lane_channels = {segment.channels_per_lane}, warps = {segment.warps};",
        f"  using Lane = LaneOf<{segment.channels_per_lane}>;",
        "  static EQ_FN constexpr int z_offset(int component) {",
        f"    constexpr int offsets[] = {{{offsets}}};",
        "    return offsets[component];",
        "  }",
    ]
    if plan.direction is Direction.FORWARD:
        lines += [
            "  template <class X, class W>",
            "  static EQ_FN void edge(const X& x, const W& w, const T* entries, Lane* z) {",
        ]
    else:
        lines += [
            "  template <class Rows>",
            "  static EQ_FN void edge(Rows& rows, const T* entries, const T* entries_b, Sum* gy) {",
        ]
    for block in segment.blocks:
        lines += [f"    {{  // {block.label}"]
        lines += [f"      {line}" for line in printer(plan, segment, block)]
        lines += ["    }"]
    return [*lines, "  }", "};", ""]


def _forward_block(plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
    for i in range(block.d1):
        yield f"const Lane x{i} = x.at({block.x_offset + i * segment.mul});"
    for path in block.paths:
        matrix = plan.matrices[path.matrix]
        yield f"{{  // path {path.number}: {path.label}"
        yield f"  const auto m = {_read_entries(matrix)};"
        weighted = path.weight_offset is not None
        if weighted:
            yield f"  const Lane wv = w.at({path.weight_offset}, {path.number});"
        if path.weight_first or not weighted:
            for i, row in _rows(matrix.elements):
                yield f"  const Lane u{i} = {f'wv * x{i}' if weighted else f'x{i}'};"
                for element in row:
                    z = f"z[{path.accumulators[element.k]}]"
                    yield f"  {z} = fma({_entry(element)}, u{i}, {z});"
        else:
            for k in range(path.d3):
                row = [element for element in matrix.elements if element.k == k]
                if row:
                    z = f"z[{path.accumulators[k]}]"
                    total = _sum_of_products("t", ((_entry(e), f"x{e.i}") for e in row))
                    yield f"  {{ {total} {z} = fma(wv, t, {z}); }}"
        yield "}"


def _backward_block(plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
    yield f"auto xb = rows.template x_block<{block.d1}, {segment.mul}>({block.x_offset});"
    for path in block.paths:
        yield from _path_head(segment, path)
        for number, group in enumerate(path.passes):
            yield from (f"  {line}" for line in _backward_pass(plan, segment, path, group, first=number == 0))
        yield from _path_tail(segment, path)
    yield "xb.flush();"


def _backward_pass(
    plan: KernelPlan, segment: Segment, path: PlannedPath, group: tuple[Element, ...], first: bool
) -> Iterable[str]:
    mul, weighted = segment.mul, path.weight_offset is not None
    yield from _sums(group)
    yield f"  EQ_CHANNELS(c, {mul}) {{"
    yield f"    const auto m = {_read_entries(plan.matrices[path.matrix])};"
    if weighted:
        yield "    const Lane wv = wp.at(c);"
    yield from _gradients(segment, path, group)
    weight_terms = []
    for i, row in _rows(group):
        yield f"    const Lane x{i} = xb.x({i}, c);"
        yield "    " + _sum_of_products(f"t{i}", ((_entry(e), f"g{e.k}") for e in row))
        yield f"    xb.add({i}, c, {f'wv * t{i}' if weighted else f't{i}'});"
        weight_terms.append((f"x{i}", f"t{i}"))
        yield f"    const Lane u{i} = {f'wv * x{i}' if weighted else f'x{i}'};"
        for e in row:
            yield f"    s{e.i}_{e.k} = dot(u{i}, g{e.k}, s{e.i}_{e.k});"
    if weighted:
        yield "    " + _sum_of_products("q", weight_terms)
        yield f"    wp.template add<{'true' if first else 'false'}>(c, q);"
    yield "  }"
    yield from _fold(plan.matrices[path.matrix], group)


def _double_backward_block(plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
    yield f"auto xb = rows.template x_block<{block.d1}, {segment.mul}>({block.x_offset});"
    for path in block.paths:
        yield from _path_head(segment, path)
        for number, group in enumerate(path.passes):
            yield from (f"  {line}" for line in _double_backward_pass(plan, segment, path, group, first=number == 0))
        yield from _path_tail(segment, path)
    yield "xb.flush();"


def _double_backward_pass(
    plan: KernelPlan, segment: Segment, path: PlannedPath, group: tuple[Element, ...], first: bool
) -> Iterable[str]:
    mul, weighted = segment.mul, path.weight_offset is not None
    outputs = sorted({element.k for element in group})
    yield from _sums(group)
    yield f"  EQ_CHANNELS(c, {mul}) {{"
    matrix = plan.matrices[path.matrix]
    yield f"    const auto m = {_read_entries(matrix)}, n = {_read_entries(matrix, 'entries_b')};"
    if weighted:
        yield "    const Lane wv = wp.at(c), cv = wp.tangent(c);"
    yield from _gradients(segment, path, group)
    for k in outputs:
        yield f"    Lane z{k} = rows.template z<{mul}>({path.accumulators[k]}, {path.z_offset + k * mul}, c);"
    weight_terms = []
    for i, row in _rows(group):
        yield f"    const Lane x{i} = xb.x({i}, c), a{i} = xb.a({i}, c);"
        if weighted:
            yield f"    const Lane v{i} = fma(wv, a{i}, cv * x{i}), u{i} = wv * x{i};"
        else:
            yield f"    const Lane v{i} = a{i}, u{i} = x{i};"
        yield "    " + _sum_of_products(f"t{i}", ((_entry(e), f"g{e.k}") for e in row))
        yield "    " + _sum_of_products(f"r{i}", ((_entry(e, "n"), f"g{e.k}") for e in row))
        for e in row:
            yield f"    z{e.k} = fma({_entry(e, 'n')}, u{i}, fma({_entry(e)}, v{i}, z{e.k}));"
            yield f"    s{e.i}_{e.k} = dot(v{i}, g{e.k}, s{e.i}_{e.k});"
        yield f"    xb.add({i}, c, {f'fma(cv, t{i}, wv * r{i})' if weighted else f'r{i}'});"
        weight_terms += [(f"a{i}", f"t{i}"), (f"x{i}", f"r{i}")]
    for k in outputs:
        yield f"    rows.template set_z<{mul}>({path.accumulators[k]}, {path.z_offset + k * mul}, c, z{k});"
    if weighted:
        yield "    " + _sum_of_products("q", weight_terms)
        yield f"    wp.template add<{'true' if first else 'false'}>(c, q);"
    yield "  }"
    yield from _fold(plan.matrices[path.matrix], group)


def _path_head(segment: Segment, path: PlannedPath) -> Iterable[str]:
    yield f"{{  // path {path.number}: {path.label}"
    if path.weight_offset is not None:
        yield f"  auto wp = rows.template weight<{segment.mul}>({path.weight_offset});"


def _path_tail(segment: Segment, path: PlannedPath) -> Iterable[str]:
    if path.weight_offset is not None:
        if not path.passes:  # a coefficient of zero
            yield f"  EQ_CHANNELS(c, {segment.mul}) wp.template add<true>(c, Lane{{}});"
        yield "  wp.flush();"
    yield "}"


def _sums(group: tuple[Element, ...]) -> Iterable[str]:
    yield "{"
    yield "  Sum " + ", ".join(f"s{e.i}_{e.k} = {{}}" for e in group) + ";"


def _gradients(segment: Segment, path: PlannedPath, group: tuple[Element, ...]) -> Iterable[str]:
    for k in sorted({element.k for element in group}):
        offset = path.z_offset + k * segment.mul
        yield f"    const Lane g{k} = rows.template g<{segment.mul}>({path.accumulators[k]}, {offset}, c);"


def _fold(matrix: EdgeMatrix, group: tuple[Element, ...]) -> Iterable[str]:
    """The sums over channels, contracted with the CG tensor into the gradient of y."""
    for element in group:
        for j, factor in matrix.entries[element.entry]:
            yield f"  gy[{j}] = fma({_literal(element.sign * factor)}, s{element.i}_{element.k}, gy[{j}]);"
    yield "}"


def _rows(group: tuple[Element, ...]) -> list[tuple[int, list[Element]]]:
    rows: dict[int, list[Element]] = {}
    for element in group:
        rows.setdefault(element.i, []).append(element)
    return list(rows.items())


def _sum_of_products(name: str, terms: Iterable[tuple[str, str]]) -> str:
    (left, right), *rest = terms
    return f"Lane {name} = {left} * {right};" + "".join(f" {name} = fma({a}, {b}, {name});" for a, b in rest)


def _entry(element: Element, array: str = "m") -> str:
    return f"{'-' if element.sign < 0 else ''}{array}[{element.entry}]"


def _read_entries(matrix: EdgeMatrix, array: str = "entries") -> str:
    return f"read_entries<{matrix.first}, {len(matrix.entries)}>({array})"


def _literal(value: float) -> str:
    return f"T({value!r})"


def _cpu_entries(plan: KernelPlan) -> list[str]:
    lines = ["  static EQ_FN void build_entries(const Lane* y, Lane* m) {"]
    for matrix in plan.matrices:
        for number, terms in enumerate(matrix.entries):
            total = " + ".join(f"{_literal(factor)} * y[{j}]" for j, factor in terms)
            lines.append(f"    m[{matrix.first + number}] = {total};")
    return [*lines, "  }"]


def _gpu_tables(plan: KernelPlan) -> list[str]:
    """Entries as a table of terms, so that all threads of a block build them together."""
    entries = plan.num_entries
    forms: list[tuple[tuple[int, float], ...]] = [()] * entries
    for matrix in plan.matrices:
        forms[matrix.first : matrix.first + len(matrix.entries)] = matrix.entries
    terms = plan.terms
    factors = [form[t][1] if t < len(form) else 0.0 for t in range(terms) for form in forms]
    indices = [form[t][0] if t < len(form) else -min(t, 1) for t in range(terms) for form in forms]
    return [
        f"  static constexpr int terms = {terms}, warps = {plan.warps}, stages = {plan.stages}, "
        f"edges_per_stage = {plan.edges_per_stage}, blocks_per_sm = {plan.blocks_per_sm};",
        f"  static EQ_FN T factor(int n) {{ {_table('T', map(_literal, factors))} }}",
        f"  static EQ_FN int index(int n) {{ {_table('int', map(str, indices))} }}",
    ]


def _table(scalar: str, values: Iterable[str]) -> str:
    return f"static constexpr {scalar} values[] = {{{', '.join(values)}}}; return values[n];"


def _each_block(operand: str, irreps: Irreps) -> list[str]:
    lines = ["  template <class F>", f"  static EQ_FN void each_{operand}_block(const F& run) {{"]
    for (mul, ir), where in zip(irreps, irreps.slices(), strict=True):
        lines.append(f"    run({where.start}, {mul}, {ir.dim});  // {mul}x{ir}")
    return [*lines, "  }"]

"""The printer of products of any mode: couplings as multiply-adds, shapes of paths as constants, places as tables.

The preludes (`pairs.h`, `cpu_pairs.h`, `gpu_pairs.h`) have the rest: they run a shape's code on the pairs of a path. X
and Y, in a coupling, are the types of values of x and y: vectors, or a scalar where y is the same for all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eqaccel.families.tensor_product.pairs.mixing import WARP, DenseMixing
from eqaccel.families.tensor_product.pairs.plan import Coupling, PairPlan, Shape, WeightCopies
from eqaccel.families.tensor_product.plan.model import Element
from eqaccel.families.tensor_product.spec import Mixing, Pairs, Path
from eqaccel.families.tensor_product.text import literal, table, wrapped
from eqaccel.irreps import Irreps

_MOST_CONSTANT_PATHS = 1000  # of 40 bytes each
_PAIRS = {Pairs.ALL: "all_pairs", Pairs.EQUAL: "equal_pairs", Pairs.ORDERED: "ordered_pairs"}
_MIXINGS = {
    Mixing.OWN: "own_channels",
    Mixing.OVER_V: "over_v",
    Mixing.OVER_U: "over_u",
    Mixing.DENSE: "dense",
}
_COPIES = {
    WeightCopies.NONE: "no_copies",
    WeightCopies.ROWS: "copies_of_rows",
    WeightCopies.CHUNKS: "copies_of_chunks",
}


def print_launch(plan: PairPlan) -> str:
    """The first part of a body for a GPU: how it is launched. Plans that differ in no more have the same rest."""
    if not plan.target.is_gpu:
        return ""
    tiled = [number for number, (shape, _) in enumerate(plan.shapes) if not shape.is_own]
    numbers = f"warps = {plan.warps}, edges = {plan.edges}, span = {plan.span}, shared_bytes = {plan.shared_bytes()}"
    return "\n".join(
        [
            "namespace {",
            "struct Launch {",
            f"  static constexpr int {numbers};",
            f"  static constexpr bool rows_shared = {_bool(plan.rows_shared)};  // sums of an edge",
            f"  static constexpr bool stores_z = {_bool(plan.stores_z)};  // in place of adding it up",
            f"  static constexpr WeightCopies copies = {_COPIES[plan.weight_copies]};",
            f"  static constexpr int stages = {plan.stages}, chunk = {plan.chunk_elements};",
            *(_mixing(number, plan.mixings[number]) for number in tiled),
            "};",
            "}  // namespace",
            "",
            "",
        ]
    )


def _bool(value: bool) -> str:
    return str(value).lower()


def _mixing(number: int, mixing: DenseMixing) -> str:
    code = f"MixingCode<{mixing.lanes}, {mixing.channels}, {mixing.together}, {mixing.pairs}>"
    return f"  typedef Mixing<{code}, {mixing.tile}, {mixing.chunk}> Mixing{number};"


def launch_numbers(name: str, plan: PairPlan) -> dict[str, int]:
    """What the payload's meta says of the launch of the body in entry `name`."""
    numbers = {
        "threads": WARP,
        "shared_bytes": plan.shared_bytes(),
        "edges_held": plan.edges,
        "streams_weights": int(plan.streams_weights),
    }
    return {f"{name}/kernels": 1} | {f"{name}/0/{key}": value for key, value in numbers.items()}


def print_code(plan: PairPlan) -> str:
    """The rest of a body."""
    lines = ["namespace {", ""]
    for number, coupling in enumerate(plan.couplings):
        lines += _coupling(number, coupling)
    for number, (shape, paths) in enumerate(plan.shapes):
        lines += _shape(plan, number, shape, [plan.spec.paths[path] for path in paths])
    export = "ROW_BLOCKS" if plan.spec.rows_share_weights and not plan.target.is_gpu else "PAIRS"
    return "\n".join([*lines, *_problem(plan), "}  // namespace", f"EQ_EXPORT_{export}(Problem)", ""])


def _coupling(number: int, coupling: Coupling) -> list[str]:
    (d1, d2, d3), elements = coupling.dims, coupling.matrix.elements
    lines = [
        f"struct Coupling{number} {{  // {coupling.label}",
        f"  static constexpr int d1 = {d1}, d2 = {d2}, d3 = {d3};",
        "  template <class X, class Y>",
        "  static EQ_FN void to_z(const X* x, const Y* y, X* z) {",
        *_entries(coupling),
        *(f"    z[{e.k}] {_sign(e)}= m{e.entry} * x[{e.i}];" for e in elements),
        "  }",
        "  template <class X, class Y>",
        "  static EQ_FN void to_x(const Y* y, const X* z, X* x) {",
        *_entries(coupling),
        *(f"    x[{e.i}] {_sign(e)}= m{e.entry} * z[{e.k}];" for e in elements),
        "  }",
        "  template <class X>",
        "  static EQ_FN void to_y(const X* x, const X* z, X* y) {",
    ]
    for entry, terms in enumerate(coupling.matrix.entries):
        products = [f"{_sign(e)}x[{e.i}] * z[{e.k}]" for e in elements if e.entry == entry]
        lines.append(f"    const X m{entry} = {_sum(products)};")
        lines += [f"    y[{j}] += {literal(factor)} * m{entry};" for j, factor in terms]
    return [*lines, "  }", "};", ""]


def _entries(coupling: Coupling) -> Iterable[str]:
    for number, terms in enumerate(coupling.matrix.entries):
        yield f"    const Y m{number} = {' + '.join(f'{literal(factor)} * y[{j}]' for j, factor in terms)};"


def _sign(element: Element) -> str:
    return "-" if element.sign < 0 else "+"


def _sum(signed: Sequence[str]) -> str:
    """Terms that begin with their signs."""
    first, *rest = signed
    return first.removeprefix("+") + "".join(f" {term[0]} {term[1:]}" for term in rest)


def _shape(plan: PairPlan, number: int, shape: Shape, paths: Sequence[Path]) -> list[str]:
    mul1, mul2, mul3 = shape.muls
    places = []
    for path in paths:
        starts = (path.x_offset, path.y_offset, path.z_offset, path.weight_offset or 0)
        places.append(f"{{{', '.join(map(str, (path.in1, path.in2, path.out, *starts)))}}}")
    return [
        f"struct Shape{number} {{  // {paths[0]}",
        f"  typedef Coupling{shape.coupling} Coupling;",
        f"  static constexpr int mul1 = {mul1}, mul2 = {mul2}, mul3 = {mul3}, paths = {len(paths)};",
        f"  static constexpr PairKind pairs_kind = {_PAIRS[shape.mode.pairs]};",
        f"  static constexpr MixingKind mixing = {_MIXINGS[shape.mode.mixing]};",
        f"  static constexpr bool weighted = {_bool(shape.weighted)};",
        f"  static EQ_FN PathPlace place(int n) {{ {table('PathPlace', places, memory=_table_memory(plan))} }}",
        *([f"  typedef Launch::Mixing{number} Mixing;"] if plan.target.is_gpu and not shape.is_own else []),
        "};",
        "",
    ]


def _problem(plan: PairPlan) -> list[str]:
    spec, (d1, d2, d3) = plan.spec, plan.components
    lines = [
        f"struct Problem {{  // {spec.irreps_in1} (x) {spec.irreps_in2} -> {spec.irreps_out}",
        f"  static constexpr int x_dim = {spec.x_dim}, y_dim = {spec.y_dim}, z_dim = {spec.z_dim}, "
        f"w_dim = {spec.weight_numel};",
        f"  static constexpr int pairs = {plan.most_pairs}, d1 = {d1}, d2 = {d2}, d3 = {d3};  // at most",
    ]
    if plan.target.is_gpu:
        lines += [
            "  static constexpr int warps = Launch::warps, edges = Launch::edges, span = Launch::span;",
            "  static constexpr int shared_bytes = Launch::shared_bytes;",
            "  static constexpr bool rows_shared = Launch::rows_shared, stores_z = Launch::stores_z;",
            "  static constexpr WeightCopies copies = EQ_BULK_COPY ? Launch::copies : no_copies;",
            "  static constexpr int stages = Launch::stages, chunk = Launch::chunk;",
            *_weight_runs(plan),
        ]
    else:
        for name, irreps in (("X", spec.irreps_in1), ("Y", spec.irreps_in2), ("Z", spec.irreps_out)):
            lines += _rows(name, irreps)
    lines += ["  template <class F>", "  static EQ_FN void each_shape(const F& run) {"]
    lines += [f"    run(Shape{number}{{}});" for number in range(len(plan.shapes))]
    return [*lines, "  }", "};"]


def _table_memory(plan: PairPlan) -> str:
    """Lanes wait longer for numbers of paths in device memory than in a GPU's constant memory, which is small."""
    return "EQ_CONSTANT" if plan.target.is_gpu and len(plan.spec.paths) <= _MOST_CONSTANT_PATHS else "constexpr"


def _weight_runs(plan: PairPlan) -> list[str]:
    """Weights of paths that may come in chunks, in the order in which paths are mixed."""
    runs = [
        f"{{{plan.spec.paths[path].weight_offset}, {shape.pairs * shape.muls[2]}, "
        f"Launch::Mixing{number}::chunk * {shape.muls[2]}}}"
        for number, (shape, paths) in enumerate(plan.shapes)
        if shape.has_matrix
        for path in paths
    ]
    return [
        f"  static constexpr int runs = {len(runs)};",
        f"  static EQ_FN WeightRun weight_run(int n) {{ {table('WeightRun', runs, memory=_table_memory(plan))} }}",
    ]


def _rows(name: str, irreps: Irreps) -> list[str]:
    blocks = [f"{{{where.start}, {mul}, {ir.dim}}}" for (mul, ir), where in zip(irreps, irreps.slices(), strict=True)]
    return [
        f"  struct {name} {{",
        f"    static constexpr int count = {len(blocks)};",
        "    static EQ_FN constexpr RowBlock block(int n) {",
        f"      constexpr RowBlock blocks[] = {{{wrapped(blocks) or '{0, 0, 0}'}}};",
        "      return blocks[n];",
        "    }",
        "  };",
    ]

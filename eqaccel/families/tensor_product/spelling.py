"""How backends spell what they do not have in common: a class each, in place of conditions in the printer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

from eqaccel.codegen import Direction
from eqaccel.families.tensor_product.plan import Block, KernelPlan, Plan, PlannedPath, Segment
from eqaccel.families.tensor_product.plan.model import place, segment_work, staged
from eqaccel.families.tensor_product.text import literal, table, wrapped
from eqaccel.families.tensor_product.units import count_units, entry_functions, entry_lines
from eqaccel.irreps import Irreps


class Spelling(ABC):
    """What the text of one kind of backend has that others spell otherwise, or do without."""

    def launch(self, plan: Plan) -> str:
        """The first part of a body: how each kernel is launched. Plans that differ in no more have the same code."""
        return ""

    def launch_numbers(self, name: str, plan: Plan) -> dict[str, int]:
        """What the payload's meta says of the launches of the body in entry `name`."""
        return {}

    def exports(self, kernel: KernelPlan) -> list[str]:
        """What follows a kernel's code."""
        return []

    @abstractmethod
    def problem(self, plan: KernelPlan) -> list[str]:
        """Members of a kernel's `Problem`."""

    @abstractmethod
    def segment(self, plan: KernelPlan, number: int) -> list[str]:
        """Members of a segment."""

    @abstractmethod
    def read_x(self, plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
        """Lines that read the components of a block of x into x0, x1 and so on, in forward kernels."""

    @abstractmethod
    def x_at(self, plan: KernelPlan, offset: int) -> str:
        """The arguments that name an element of x."""

    @abstractmethod
    def w_at(self, plan: KernelPlan, path: PlannedPath) -> str:
        """The arguments that name the first weight of a path."""

    def streamed_w_at(self, plan: KernelPlan, path: PlannedPath) -> str:
        """The same in forward kernels, which may fetch weights ahead, path by path."""
        return self.w_at(plan, path)

    def adds(self, block: Block) -> str:
        """A further template argument of a block of x: whether its gradients are added to earlier ones."""
        return ""


class _Cpu(Spelling):
    """A lane is a SIMD vector of channels, and rows are read where they are."""

    def problem(self, plan: KernelPlan) -> list[str]:
        if count_units(plan) > 1:
            code = [f"eq_entries_{number}(y, m);" for number in range(len(entry_functions(plan)))]
        else:
            code = entry_lines(plan)
        return [
            f"  static constexpr int output_channels = {_output_channels(plan)};",
            "  static EQ_FN void build_entries(const Lane* y, Lane* m) {",
            *(f"    {line}" for line in code),
            "  }",
            *_each_block("x", plan.spec.irreps_in1),
            *_each_block("z", plan.spec.irreps_out),
        ]

    def segment(self, plan: KernelPlan, number: int) -> list[str]:
        lines = [
            "  static EQ_FN constexpr int z_offset(int component) {",
            f"    constexpr int offsets[] = {{{wrapped(map(str, plan.segments[number].z_offsets))}}};",
            "    return offsets[component];",
            "  }",
        ]
        # A segment's part of the cache lines of weights that are fetched ahead, one a path: as its part of the work.
        if plan.direction is not Direction.FORWARD:
            return lines
        work = [segment_work(plan.direction, plan.matrices, segment) for segment in plan.segments]
        weighted = sum(path.weight_offset is not None for path in plan.spec.paths)
        first, end = (round(weighted * sum(work[:n]) / sum(work)) for n in (number, number + 1))
        return [*lines, f"  static constexpr int first_fetch = {first}, end_fetch = {end};"]

    def read_x(self, plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
        for i in range(block.d1):
            yield f"const Lane x{i} = x.at({block.x_offset + i * segment.mul});"

    def x_at(self, plan: KernelPlan, offset: int) -> str:
        return f"{offset}"

    def w_at(self, plan: KernelPlan, path: PlannedPath) -> str:
        return f"{path.weight_offset}"

    def streamed_w_at(self, plan: KernelPlan, path: PlannedPath) -> str:
        return f"{path.weight_offset}, {path.number}"


class _Gpu(Spelling):
    """A lane is a thread; rows are copied to shared memory, and have a place there and one in global memory."""

    def launch(self, plan: Plan) -> str:
        lines = ["namespace {"]
        for kernel in plan.kernels:
            lines += [
                f"namespace kernel{kernel.number} {{",
                "struct Launch {",
                f"  static constexpr int stages = {kernel.stages}, edges_per_stage = {kernel.edges_per_stage};",
                f"  static constexpr int blocks_per_sm = {kernel.blocks_per_sm}, "
                f"shared_bytes = {kernel.shared_bytes()};",
                f"  static constexpr int warps = {kernel.warps}, sums = {kernel.all_sums};",
                f"  static constexpr int turned = {kernel.all_turned};",
            ]
            for number, segment in enumerate(kernel.segments):
                warps, sums = segment.warps_per_group, kernel.sums(segment)
                turned, room = kernel.turned(segment), kernel.room(segment)
                lines += [
                    f"  static constexpr int warps_per_group{number} = {warps}, sums{number} = {sums};",
                    f"  static constexpr int turned{number} = {turned}, room{number} = {room};",
                ]
            lines += ["};", "}"]
        return "\n".join([*lines, "}  // namespace", "", ""])

    def launch_numbers(self, name: str, plan: Plan) -> dict[str, int]:
        numbers = {f"{name}/kernels": len(plan.kernels)}
        for kernel in plan.kernels:
            of_kernel = {
                "threads": kernel.threads,
                "shared_bytes": kernel.shared_bytes(),
                "edges_held": kernel.stages * kernel.edges_per_stage,
                "streams_weights": 0,
            }
            numbers |= {f"{name}/{kernel.number}/{key}": value for key, value in of_kernel.items()}
        return numbers

    def exports(self, kernel: KernelPlan) -> list[str]:
        return [f"EQ_EXPORT_MAIN(eq_main_{kernel.number}, kernel{kernel.number}::Problem)"]

    def problem(self, plan: KernelPlan) -> list[str]:
        # What the pipeline copies, and a table of terms of entries, so that all threads of a block build them together.
        adds = str(plan.number > 0).lower()
        places = list(plan.single_terms)
        terms = len(plan.several_terms[0][1]) if plan.several_terms else 0
        places += [(at, form[t]) for t in range(terms) for at, form in plan.several_terms]
        terms_table = [f"{{{literal(factor)}, {at}, {j}}}" for at, (j, factor) in places]
        spans = (*plan.x_spans, *plan.w_spans)
        copies = [f"{{{p.offset}, {p.staged}, {p.length}}}" for p in spans]
        return [
            "  static constexpr int stages = Launch::stages, edges_per_stage = Launch::edges_per_stage;",
            "  static constexpr int blocks_per_sm = Launch::blocks_per_sm, shared_bytes = Launch::shared_bytes;",
            f"  static constexpr int warps = Launch::warps, warp_groups = {plan.warp_groups};",
            "  static constexpr int sums = Launch::sums, turned = Launch::turned;",
            f"  static constexpr bool adds = {adds};  // to the gradients of y of kernels before",
            f"  static constexpr int x_staged = {staged(plan.x_spans)}, w_staged = {plan.w_staged};",
            f"  static constexpr int x_spans = {len(plan.x_spans)}, spans = {len(spans)}, copied = {_copied(plan)};",
            f"  static constexpr int granule = {_granule(plan)};  // divides where spans begin and end",
            f"  static EQ_FN CopySpan span(int n) {{ {table('CopySpan', copies)} }}",
            f"  static constexpr int single = {len(plan.single_terms)};  // entries of one term; then those of several",
            f"  static constexpr int several = {len(plan.several_terms)}, terms = {terms};",
            f"  static EQ_FN Term term(int n) {{ {table('Term', terms_table)} }}",
            f"  static EQ_FN bool reads_x(int n) {{ return {_reads_x(plan)}; }}",
            *_each_block("x", plan.spec.irreps_in1),
        ]

    def segment(self, plan: KernelPlan, number: int) -> list[str]:
        segment = plan.segments[number]
        # z_row is of a component that is not known when the text is compiled; groups of several warps need it.
        blocks = segment.z_blocks
        rows = [f"{{{block.offset}, {row}, {block.d}}}" for block in blocks for row in range(block.d)]
        return [
            f"  static constexpr int warp_groups = {segment.warp_groups};",
            f"  static constexpr int warps_per_group = Launch::warps_per_group{number};",
            f"  static constexpr int sums = Launch::sums{number};",
            f"  static constexpr int turned = Launch::turned{number}, room = Launch::room{number};",
            f"  static EQ_FN ZRow z_row(int component) {{ {table('ZRow', rows, 'component')} }}",
            "  template <class F>",
            "  static EQ_FN void each_z(const F& run) {",
            *(f"    run(ZBlock<{block.offset}, {block.first}, {block.d}>{{}});" for block in blocks),
            "  }",
        ]

    def read_x(self, plan: KernelPlan, segment: Segment, block: Block) -> Iterable[str]:
        yield f"const auto xb = x.template block<{block.d1}>({place(plan.x_spans, block.x_offset)});"
        yield f"const Lane {', '.join(f'x{i} = xb[{i}]' for i in range(block.d1))};"

    def x_at(self, plan: KernelPlan, offset: int) -> str:
        return f"{place(plan.x_spans, offset)}, {offset}"

    def w_at(self, plan: KernelPlan, path: PlannedPath) -> str:
        assert path.weight_offset is not None
        return f"{place(plan.w_spans, path.weight_offset)}, {path.weight_offset}"

    def adds(self, block: Block) -> str:
        return f", {str(block.adds).lower()}"


_GPU = _Gpu()
SPELLINGS: dict[str, Spelling] = {"cpu": _Cpu(), "cuda": _GPU, "hip": _GPU}
"""The spelling of each backend."""


def spelling(plan: Plan | KernelPlan) -> Spelling:
    """That of the backend which a plan is for."""
    return SPELLINGS[plan.target.backend]


def _copied(plan: KernelPlan) -> int:
    """What is copied of the rows of an edge, in elements of the kernel's type."""
    x, w = (sum(span.length for span in spans) for spans in (plan.x_spans, plan.w_spans))
    return x + -(-w * plan.weight_bytes // plan.scalar_bytes)


def _reads_x(plan: KernelPlan) -> str:
    """Whether a path reads column n of x, in C++."""
    read = {path.x_offset for path in plan.spec.paths}
    unread = [where for where in plan.spec.irreps_in1.slices() if where.start not in read and where.stop > where.start]
    return " && ".join(f"(n < {where.start} || n >= {where.stop})" for where in unread) or "true"


def _granule(plan: KernelPlan) -> int:
    """What divides where spans begin and end, in elements of the kernel's type."""
    rows = (
        (plan.spec.x_dim, plan.x_spans, plan.scalar_bytes),
        (plan.spec.weight_numel, plan.w_spans, plan.weight_bytes),
    )
    lengths = (n * size for dim, spans, size in rows for n in (dim, *(n for p in spans for n in (p.offset, p.length))))
    whole, rest = divmod(math.gcd(*lengths), plan.scalar_bytes)
    return 1 if rest else whole


def _output_channels(plan: KernelPlan) -> int:
    """What divides the channels of every output, or 0 unless each output is complete after one segment."""
    offsets = sorted((offset, s.mul) for s in plan.segments for offset in s.z_offsets)
    ends = [0, *(offset + mul for offset, mul in offsets)]
    complete = [offset for offset, _ in offsets] == ends[:-1] and ends[-1] == plan.spec.z_dim
    return math.gcd(*(segment.mul for segment in plan.segments)) if complete else 0


def _each_block(operand: str, irreps: Irreps) -> list[str]:
    lines = ["  template <class F>", f"  static EQ_FN void each_{operand}_block(const F& run) {{"]
    for (mul, ir), where in zip(irreps, irreps.slices(), strict=True):
        lines.append(f"    run({where.start}, {mul}, {ir.dim});  // {mul}x{ir}")
    return [*lines, "  }"]

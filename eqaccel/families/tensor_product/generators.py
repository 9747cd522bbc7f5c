"""The two ways to plan and print a tensor product, and the one place where a spec is told which one is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result, flatten_prelude
from eqaccel.errors import TuningError, UnsupportedError
from eqaccel.families.tensor_product import body, reference
from eqaccel.families.tensor_product.pairs import PairPlan, execute_pairs, plan_pairs
from eqaccel.families.tensor_product.pairs import body as pairs_body
from eqaccel.families.tensor_product.plan import UNTUNED, Plan, Tuning, candidates, is_ordered_for, make_plan
from eqaccel.families.tensor_product.spec import TensorProductSpec
from eqaccel.families.tensor_product.spelling import spelling
from eqaccel.targets import MACHINE_CLASSES, Target

AnyPlan = Plan | PairPlan
"""A plan of either generator."""


class Generator(ABC):
    """From specs to text.

    Attributes:
        preludes: Files of the preludes of CPUs and GPUs.
    """

    preludes: ClassVar[tuple[str, str]]

    @abstractmethod
    def plan(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Tuning = UNTUNED
    ) -> Any:
        """The plan of a direction."""

    def suits(self, plan: Any, target: Target) -> bool:
        """Whether a plan of larger machines is for a GPU as well."""
        return bool(plan.shared_bytes() <= target.shared_bytes)

    @abstractmethod
    def tunings(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int
    ) -> tuple[Tuning, ...]:
        """What is worth timing; the first one leaves all to the plan."""

    @abstractmethod
    def execute(self, plan: Any, **operands: Any) -> Result:
        """Runs a plan in NumPy; operands are those of `eqaccel.families.tensor_product.reference.execute`."""

    @abstractmethod
    def launch(self, plan: Any) -> str:
        """The first part of a body: how it is launched. Plans that differ in no more have the same `code`."""

    @abstractmethod
    def code(self, plan: Any) -> str:
        """The rest of a body."""

    @abstractmethod
    def launch_numbers(self, name: str, plan: Any) -> dict[str, int]:
        """What the payload's meta says of the launches of the body in entry `name`."""

    def prelude(self, backend: str, spec: TensorProductSpec | None = None) -> str:
        """The text in front of every body of a spec on a backend, "cpu", "cuda" or "hip"; by default, of most specs."""
        storage = "#define EQ_BFLOAT16_WEIGHTS\n" if spec and spec.bfloat16_weights else ""
        return storage + flatten_prelude(self.preludes[backend != "cpu"], backend)


class _Channelwise(Generator):
    """Every channel for itself, by edge matrices."""

    preludes = ("cpu.h", "gpu.h")

    def prelude(self, backend: str, spec: TensorProductSpec | None = None) -> str:
        storage = ""
        if backend != "cpu" and spec:
            storage += "#define EQ_IR_MUL\n" if spec.layout == "ir_mul" else ""
            storage += "#define EQ_BY_ROWS\n" if spec.by_rows else ""
        return storage + super().prelude(backend, spec)

    def plan(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Tuning = UNTUNED
    ) -> Plan:
        return make_plan(spec, direction, target, scalar_bytes, tuning)

    def suits(self, plan: Plan, target: Target) -> bool:
        return super().suits(plan, target) and is_ordered_for(plan, target)

    def tunings(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int
    ) -> tuple[Tuning, ...]:
        if direction is Direction.TRIPLE_BACKWARD:  # of a payload that knows no modules
            return (UNTUNED,)
        return candidates(spec, direction, target, scalar_bytes)

    def execute(self, plan: Plan, **operands: Any) -> Result:
        return reference.execute(plan, **operands)

    def launch(self, plan: Plan) -> str:
        return spelling(plan).launch(plan)

    def code(self, plan: Plan) -> str:
        return body.print_code(plan)

    def launch_numbers(self, name: str, plan: Plan) -> dict[str, int]:
        return spelling(plan).launch_numbers(name, plan)


class _Pairs(Generator):
    """Pairs of channels, mixed."""

    preludes = ("cpu_pairs.h", "gpu_pairs.h")

    def prelude(self, backend: str, spec: TensorProductSpec | None = None) -> str:
        if backend == "cpu" and spec and spec.rows_share_weights:
            return flatten_prelude("cpu_row_blocks.h", backend)
        return super().prelude(backend, spec)

    def suits(self, plan: PairPlan, target: Target) -> bool:
        # Each class has a plan of its own where some machines copy operands: that one is little use to others, which
        # would take it for one that fits.
        return super().suits(plan, target) and not replace(plan, target=MACHINE_CLASSES[0]).copies_operands

    def plan(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Tuning = UNTUNED
    ) -> PairPlan:
        if tuning != UNTUNED:
            raise TuningError(f"tuning: expected none for a product that is not channel by channel, got {tuning}")
        if direction is Direction.TRIPLE_BACKWARD:
            raise UnsupportedError(
                "spec: expected a product that is channel by channel, for a kernel of third derivatives, got "
                f"{spec!r}, whose third derivatives are composed of kernels of lower ones"
            )
        return plan_pairs(spec, direction, target, scalar_bytes)

    def tunings(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int
    ) -> tuple[Tuning, ...]:
        return (UNTUNED,)

    def execute(self, plan: PairPlan, **operands: Any) -> Result:
        return execute_pairs(plan.spec, plan.direction, **operands)

    def launch(self, plan: PairPlan) -> str:
        return pairs_body.print_launch(plan)

    def code(self, plan: PairPlan) -> str:
        return pairs_body.print_code(plan)

    def launch_numbers(self, name: str, plan: PairPlan) -> dict[str, int]:
        return pairs_body.launch_numbers(name, plan)


CHANNELWISE: Generator = _Channelwise()
PAIRS: Generator = _Pairs()


def generator(spec: TensorProductSpec) -> Generator:
    """The way in which a spec is computed."""
    return CHANNELWISE if spec.is_channelwise else PAIRS


def plan_of(
    spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Tuning = UNTUNED
) -> Any:
    """The plan of a direction of any spec: a `Plan` or a `PairPlan`."""
    return generator(spec).plan(spec, direction, target, scalar_bytes, tuning)


def body_of(plan: AnyPlan) -> str:
    """The text of a plan's body."""
    way = generator(plan.spec)
    return way.launch(plan) + way.code(plan)

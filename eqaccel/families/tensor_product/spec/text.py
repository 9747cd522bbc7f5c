"""Specs as text: what a payload says that it computes, for kernels that are made later."""

from __future__ import annotations

from typing import cast

from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Instruction
from eqaccel.families.tensor_product.spec.tensor_product import Layout, TensorProductSpec
from eqaccel.irreps import Irreps


def spec_text(spec: TensorProductSpec) -> str:
    """A spec as a line of what all paths have in common, and a line for each path."""
    irreps = f"{spec.irreps_in1}|{spec.irreps_in2}|{spec.irreps_out}"
    lines = [f"{irreps}|{int(spec.shared_weights)}|{int(spec.bfloat16_weights)}|{spec.layout}|{int(spec.by_rows)}"]
    for path in spec.paths:
        weighted = int(path.weight_offset is not None)
        lines.append(f"{path.in1} {path.in2} {path.out} {path.mode} {weighted} {path.coefficient.hex()}")
    return "\n".join(lines)


def read_spec_text(text: str) -> TensorProductSpec:
    """The spec that a text was made of: of the same digest, and the same payload."""
    head, *lines = text.splitlines()
    *irreps, shared, rounded, layout, by_rows = head.split("|")
    in1, in2, out = map(Irreps, irreps)
    instructions, coefficients = [], []
    for line in lines:
        block1, block2, block3, mode, weighted, coefficient = line.split()
        blocks = int(block1), int(block2), int(block3)
        instructions.append(Instruction(*blocks, ConnectionMode(mode), bool(int(weighted))))
        coefficients.append(float.fromhex(coefficient))
    spec = TensorProductSpec.of_coefficients((in1, in2, out), instructions, coefficients, bool(int(shared)))
    spec = spec.with_layout(cast(Layout, layout), bool(int(by_rows)))
    return spec.with_bfloat16_weights() if int(rounded) else spec

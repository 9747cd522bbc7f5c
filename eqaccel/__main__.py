"""`python -m eqaccel`: this machine (`doctor`, `cache`), specs (`show`), speed (`bench`), files (`export`, `libs`).

MACE's training program runs on a patched model as `mace_run_train`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from eqaccel.errors import EqaccelError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="eqaccel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="devices, compilers, caches and versions, and what to install")
    cache = commands.add_parser("cache", help="folder, content and size of the cache of compiled kernels")
    cache.add_argument("--clear", action="store_true", help="empty it")
    show = commands.add_parser("show", help="spec, plan or source of any kernel, for any target")
    if arguments[:1] == ["show"]:  # its help lists the families
        from eqaccel.command.show import add_arguments

        add_arguments(show)
    export = commands.add_parser("export", help="write a model to a file for LAMMPS and other programs without Python")
    export.add_argument(
        "model",
        help="file of torch.save with the whole model, .nequip.zip, .ckpt or .pth, or a name of SevenNet's; it runs "
        "code, so trust its source",
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
    commands.add_parser("mace_run_train", help="MACE's training program on a patched model; has MACE's own options")
    try:
        if arguments[:1] == ["bench"]:  # needs torch and more, which the other commands do without
            from eqaccel.benchmarks.command import main as bench

            return bench(arguments[1:])
        if arguments[:1] == ["mace_run_train"]:
            from eqaccel.integrations import mace_training

            mace_training.run(arguments[1:])
            return 0
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
    from eqaccel.command import show

    return show.run(options)


def _doctor(_: argparse.Namespace) -> str:
    from eqaccel.command import doctor

    return doctor.run()


def _export(options: argparse.Namespace) -> str:
    import json

    import eqaccel
    from eqaccel.errors import AlreadyPatchedError, ExportError
    from eqaccel.integrations.export import open_model

    if all(map(os.path.exists, (options.model, options.path))) and os.path.samefile(options.model, options.path):
        raise ExportError(
            f"path: expected another file than that of the model, which would be lost, got '{options.path}'; choose "
            "another name"
        )
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


if __name__ == "__main__":
    sys.exit(main())

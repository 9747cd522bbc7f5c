"""Times whole MACE and NequIP models, energy and forces, before and after eqaccel.patch(model) and beside peers.

The models have random weights and frozen parameters. Beside the whole call this times the convolutions alone, by
replaying them on what they were called with, and the seconds that the kernels of all models take to compile with an
empty and with a filled cache. On a GPU it adds the time of the kernels of a call, and the call replayed from a CUDA
graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import eqaccel
from eqaccel import Polynomial, TensorProductConv
from eqaccel.benchmarks import report, suite
from eqaccel.benchmarks.compile_times import Spec, cold_and_warm
from eqaccel.benchmarks.families import FAMILIES, ModelCase, Variant
from eqaccel.benchmarks.model_timing import device_kernels, time_variants
from eqaccel.benchmarks.timing import Timing, describe, free_memory
from eqaccel.patches.copying import duplicated

# e3nn 0.4 keeps some of its constants in float32, and the peers do not.
LIMITS = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative difference of energies and forces that a variant may have."""
PEERS = {"cue": "cuEquivariance", "oeq": "OpenEquivariance"}
"""Names on the command line."""
_PARTS = ("call", "replayed", "forward", "backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    known = ", ".join(FAMILIES)
    defaults = "default: mp0-medium,nequip-water,nequip-l or, on a CPU, mp0-medium,nequip-m"
    parser.add_argument("--models", type=suite.names(FAMILIES), help=f"some of {known}; {defaults}")
    parser.add_argument("--atoms", type=suite.names(None), help="default: for MACE 64,1000 or, on a CPU, 216")
    parser.add_argument("--elements", type=int, help="instead of those of a MACE model")
    parser.add_argument("--channels", type=int, help="of every irrep, instead of those of the model")
    parser.add_argument("--compare", type=suite.names([*PEERS, "none"]), default="cue,oeq")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--budget", type=float, help="seconds for each thing that is timed (2 or 60)")
    parser.add_argument("--backends", default="cpu,cuda", help="backends whose compiler is timed, or none")
    parser.add_argument("--arch", default="sm_90", help="architecture to compile for on cuda")


def run(arguments: argparse.Namespace) -> report.Results:
    """Every model on structures of every size, plain, patched and converted."""
    gpu = arguments.device == "cuda"
    torch.set_num_threads(arguments.threads)
    arguments.models = arguments.models or ["mp0-medium", *(["nequip-water", "nequip-l"] if gpu else ["nequip-m"])]
    arguments.budget = arguments.budget or (2.0 if gpu else 60.0)
    results = report.new_results("models", arguments) | {"compile": {}}
    work: list[tuple[type[ModelCase], str, int]] = []
    specs: dict[Spec, None] = {}
    for name in arguments.models:
        try:
            family = FAMILIES[name].load()
        except ImportError as missing:
            results["rows"].append(_untimed(name, describe(missing)))
            continue
        work += [(family, name, int(atoms)) for atoms in arguments.atoms or family.sizes(name, arguments.device)]
    with suite.progress(len(work)) as bar:
        for family, name, atoms in work:
            suite.describe_step(bar, f"{name}, {atoms} atoms")
            free_memory()
            try:
                case = family.build(name, atoms, arguments)
                if arguments.backends != "none":
                    specs |= dict.fromkeys(_specs(case))
                rows = _time_case(case, arguments)
                results["rows"] += [{"model": name} | row for row in rows]
            except torch.OutOfMemoryError as error:  # of what the others are compared with
                results["rows"].append(_untimed(name, f"{atoms} atoms: {describe(error)}"))
            if arguments.json:
                report.write(arguments.json, json.dumps(results, indent=1) + "\n")
            bar.update()
    for backend in filter(lambda name: specs and name != "none", arguments.backends.split(",")):
        arch = None if backend == "cpu" else arguments.arch
        try:
            found = cold_and_warm(list(specs), backend, arch, arguments.dtype)
        except RuntimeError as error:
            found = {"note": describe(error)}
        results["compile"][backend if arch is None else f"{backend} {arch}"] = found
    return results


def _specs(case: ModelCase) -> list[Spec]:
    """What a patched model has kernels for."""
    patched = eqaccel.patch(duplicated(case.plain), verify=False)
    return [module.spec for module in patched.modules() if isinstance(module, (TensorProductConv, Polynomial))]


def _untimed(model: str, note: str) -> dict[str, Any]:
    return {"model": model, "atoms": None, "edges": None, "implementation": "eqaccel", "note": note, "begun": False}


def _time_case(case: ModelCase, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant of one model on one structure: the plain one first, then the patched one."""
    facts = {"atoms": case.atoms, "edges": case.inputs["edge_index"].shape[1], "note": ""}
    makers: dict[str, Variant] = {
        "e3nn": lambda plain, _: plain,
        "eqaccel": lambda plain, _: eqaccel.patch(duplicated(plain)),
        **{PEERS[word]: case.variants[PEERS[word]] for word in arguments.compare if word != "none"},
    }
    expected = _numbers(case, case.exact)
    rows: list[dict[str, Any]] = []
    models: dict[str, torch.nn.Module] = {}
    for name, make in makers.items():
        rows.append(facts | {"implementation": name})
        free_memory()
        try:
            model = make(case.plain, arguments.device)
            found = _numbers(case, model)
        except Exception as failure:
            rows[-1]["note"] = describe(failure)
            continue
        differences = {
            key: float((found[key] - right).abs().max() / right.abs().max()) for key, right in expected.items()
        }
        if model is not case.exact:
            rows[-1] |= {f"{key}_difference": difference for key, difference in differences.items()}
        if all(difference < LIMITS[getattr(torch, arguments.dtype)] for difference in differences.values()):
            models[name] = model
        else:
            wrong = ", ".join(f"{key} {difference:.1e}" for key, difference in differences.items())
            rows[-1]["note"] = f"other numbers: relative difference of {wrong}"
    if "eqaccel" not in models:
        raise RuntimeError(f"the patched model does not work: {rows[1]['note']}")
    timings = time_variants(case, models, arguments)
    for row in rows:
        if arguments.device == "cuda" and row["implementation"] in models:
            kernels = device_kernels(lambda row=row: case.call(models[row["implementation"]]))
            row["device_ms"] = None if kernels is None else kernels[1]
        _add_timings(row, timings)
    _compare(rows)
    return rows


def _numbers(case: ModelCase, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What has to agree between variants."""
    outputs = case.call(model)
    return {"energy": outputs["energy"].detach().double(), "force": outputs["forces"].detach().double()}


def _add_timings(row: dict[str, Any], timings: Mapping[str, Timing | str]) -> None:
    """Puts the times of a row's implementation into it, and the share of the call that its convolutions have."""
    for part in _PARTS:
        timing = timings.get(f"{row['implementation']} {part}")
        if timing is not None:
            row[part] = timing.to_json() if isinstance(timing, Timing) else {"note": timing}
    medians = [row.get(part, {}).get("median_ms") for part in ("call", "forward", "backward")]
    if None not in medians:
        row["convolution_share"] = (medians[1] + medians[2]) / medians[0]


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Adds how many times that of eqaccel each time is, and how many times as fast as the plain model each call is."""
    plain, own = rows[:2]
    for row in rows:
        for part in _PARTS:
            if "median_ms" in row.get(part, {}) and "median_ms" in own.get(part, {}):
                row[part]["ratio"] = row[part]["median_ms"] / own[part]["median_ms"]
        if "median_ms" in row.get("call", {}) and "median_ms" in plain.get("call", {}):
            row["speedup"] = plain["call"]["median_ms"] / row["call"]["median_ms"]

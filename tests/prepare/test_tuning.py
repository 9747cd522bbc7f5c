"""Tuning: which plans are tried, that the fastest is kept and used only where it was asked for, and no number moves."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from executor_checks import SPECS, assert_computes_the_same

import eqaccel
from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec, runtime, warmup
from eqaccel.__main__ import main
from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import (
    CacheWarning,
    MissingCompilerError,
    SettingsError,
    TuningError,
    TuningWarning,
    WarmupError,
)
from eqaccel.families.tensor_product import (
    UNTUNED,
    KernelPlan,
    TunedKernel,
    Tuning,
    candidates,
    check,
    make_plan,
    payload,
)
from eqaccel.integrations.export.precompiled import precompiled_entries
from eqaccel.prepare import tuning
from eqaccel.prepare.tensor_product import TensorProductTask
from eqaccel.targets import MACHINE_CLASSES, TARGETS, Target, host_target
from eqaccel.testing import assert_product, random_operands

SPEC = TensorProductSpec.channelwise("6x0e+6x1o", "0e+1o+2e", "6x0e+6x1o+6x2e")
DIRECTIONS = ("forward", "backward", "double_backward")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels that there are by now, and nothing tuned."""
    folder = tmp_path_factory.mktemp("cache")
    for kernel in Path(runtime.cache_dir()).glob("*.so"):
        shutil.copy2(kernel, folder)
    return folder


@pytest.fixture(autouse=True)
def cache_folder(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the module's own."""
    for record in kernels.glob("tuned-*"):
        record.unlink()
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(kernels))
    monkeypatch.delenv("EQACCEL_TUNE", raising=False)
    return kernels


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of contenders in the comparisons that were run; the first one beside the default always wins."""
    seen: list[int] = []

    def medians(runs: Sequence[object], device: torch.device) -> list[float]:
        seen.append(len(runs))
        return [1.0, *[0.5] * (len(runs) - 1)]

    monkeypatch.setattr(tuning, "medians", medians)
    return seen


def assert_runs_on(target: Target, plan: KernelPlan) -> None:
    assert plan.shared_bytes() <= target.shared_bytes
    assert plan.blocks_per_sm * (plan.shared_bytes() + 1024) <= target.shared_bytes + 1024
    assert plan.edges_per_stage <= 32
    assert plan.threads <= 1024
    assert plan.threads * plan.blocks_per_sm <= 2048
    for segment in plan.segments:
        assert segment.warps_per_group <= plan.edges_per_stage
        width = segment.channels_per_lane
        assert width * plan.scalar_bytes <= 16
        assert segment.mul % width == 0
        assert all(offset % width == 0 for offset in segment.z_offsets)
        assert all((path.weight_offset or 0) % width == 0 for path in segment.paths)


LARGE = {
    "mace": TensorProductSpec.channelwise("128x0e+128x1o", "0e+1o+2e+3o", "128x0e+128x1o+128x2e+128x3o"),
    "mixed": TensorProductSpec.channelwise("128x0e+64x1o+32x2e", "0e+1o+2e", "128x0e+64x1o+32x2e"),
    "several_kernels": TensorProductSpec.channelwise("8x3e+8x4e", "0e+1e+2e+3e+4e", "0e+1e+2e+3e+4e"),
    "preset_l": TensorProductSpec.channelwise("128x0e+64x1o+32x2e+32x3o", "0e+1o+2e+3o", "0e+1o+2e+3o"),
    "warp_groups": TensorProductSpec.channelwise("96x0e+32x1o+32x2e", "0e+1o+2e+3o", "0e+1o+2e+3o"),
}


MACHINES = {
    target.name: target for target in (*TARGETS.values(), *MACHINE_CLASSES) if target.name.startswith(("cpu", "gpu"))
}


@pytest.mark.parametrize("scalar_bytes", [4, 8])
@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("name", [*SPECS, *LARGE])
def test_candidates_are_few_different_and_legal(name: str, target: str, scalar_bytes: int) -> None:
    spec = (SPECS | LARGE)[name]
    for direction in Direction:
        arguments = (spec, direction, MACHINES[target], scalar_bytes)
        found = candidates(*arguments)
        plans = [make_plan(*arguments, tuning) for tuning in found]
        assert found[0] == UNTUNED
        assert 1 <= len(found) <= 8
        assert all(plan not in plans[:number] for number, plan in enumerate(plans))
        for plan in plans:
            assert sorted(p.number for s in plan.segments for p in s.paths) == list(range(len(spec.paths)))
            if MACHINES[target].is_gpu:
                for kernel in plan.kernels:
                    assert_runs_on(MACHINES[target], kernel)


@pytest.mark.parametrize("target", ["cpu-avx512", "sm_90"])
@pytest.mark.parametrize("direction", Direction)
def test_candidates_compute_the_same(direction: Direction, target: str) -> None:
    arguments = (SPEC, direction, TARGETS[target], 8)
    operands = check.problem(SPEC, direction)
    graph = {"receiver": check.RECEIVER, "sender": check.SENDER, "num_receivers": 3}
    expected, *others = (make_plan(*arguments, tuned) for tuned in candidates(*arguments))
    assert others
    for other in others:
        assert_computes_the_same(other, expected, **operands, **graph)


@pytest.mark.parametrize(
    ("target", "choices", "message"),
    [
        ("sm_90", {"channels_per_lane": 3}, "channels_per_lane: expected one of 1, 2, 4, to which .* 32 bits, got 3"),
        ("sm_90", {"edges_per_stage": 32}, "edges_per_stage, .* expected at most 232448 bytes .* sm_90, got"),
        ("sm_90", {"edges_per_stage": 33}, "edges_per_stage: expected at most 32, one for each lane of a warp, got 33"),
        ("sm_80", {"stages": 99, "edges_per_stage": 4}, "expected at most 166912 bytes of shared memory on sm_80"),
        ("sm_90", {"stages": 1}, "stages: expected at least 2, got 1"),
        ("sm_90", {"blocks_per_sm": 99}, r"blocks_per_sm: expected at most \d+ blocks of \d+ warps, got 99"),
        ("sm_90", {"accumulators": 1, "channels_per_lane": 1}, "expected at most 32 warps a block, got"),
        ("cpu-avx2", {"stages": 2}, "stages: expected None on cpu-avx2, got 2"),
        ("sm_90", {"stages": 0}, "stages: expected a whole number of at least 1, or None, got 0"),
        ("sm_90", {"stages": 2.5}, "stages: expected a whole number of at least 1, or None, got 2.5"),
    ],
)
def test_refused_tunings(target: str, choices: dict[str, int], message: str) -> None:
    with pytest.raises(TuningError, match=message):
        make_plan(LARGE["mace"], Direction.FORWARD, TARGETS[target], 4, Tuning(**choices))


def test_a_stage_has_an_edge_for_each_warp_of_a_group() -> None:
    with pytest.raises(TuningError, match="edges_per_stage: expected at least 4, one for each warp of a group, got 2"):
        make_plan(LARGE["warp_groups"], Direction.BACKWARD, TARGETS["sm_90"], 4, Tuning(edges_per_stage=2))


@pytest.mark.parametrize("direction", COMMON)
def test_a_tuning_is_of_all_kernels_of_a_plan(direction: Direction) -> None:
    arguments = (LARGE["several_kernels"], direction, TARGETS["sm_90"], 4)
    asked = Tuning(channels_per_lane=2, edges_per_stage=3, stages=4, blocks_per_sm=5)
    plan = make_plan(*arguments, asked)
    assert len(plan.kernels) == len(make_plan(*arguments).kernels) > 1
    assert {segment.channels_per_lane for segment in plan.segments} == {2}
    assert {(k.edges_per_stage, k.stages, k.blocks_per_sm) for k in plan.kernels} == {(3, 4, 5)}
    kernel = TunedKernel(TARGETS["sm_90"], direction, 4, asked)
    program = runtime.Program(payload(LARGE["several_kernels"], (kernel,))[0])
    name = f"tuned/sm_90/{direction.value}/float32"
    assert program.number(f"{name}/kernels") == len(plan.kernels)
    for k in plan.kernels:
        assert program.number(f"{name}/{k.number}/threads") == k.threads
        assert program.number(f"{name}/{k.number}/shared_bytes") == k.shared_bytes()


def test_a_tuned_kernel_is_for_one_kind_of_processor() -> None:
    kernel = TunedKernel(TARGETS["sm_80"], Direction.FORWARD, 4, Tuning(channels_per_lane=1, stages=2))
    (content, key), (tuned, tuned_key) = payload(LARGE["mace"]), payload(LARGE["mace"], (kernel,))
    assert key != tuned_key
    assert payload(LARGE["mace"], ()) == (content, key)
    default, program = runtime.Program(content), runtime.Program(tuned)
    # The binary that runs on sm_86 was made from the body of sm_80, and has to be launched as that.
    precompiled = runtime.Program(tuned + b"binary/sm_80/forward/float32 5\ncubin\n")

    def body(of: runtime.Program, arch: str, scalar: str = "float32") -> str:
        return of.source("cuda", scalar, "forward", arch)

    assert "lane_channels = 1" in body(program, "sm_80") != body(default, "sm_80")
    assert body(precompiled, "sm_86") == body(program, "sm_80")
    for arch, scalar in (("sm_90", "float32"), ("sm_86", "float32"), ("sm_80", "float64")):
        assert body(program, arch, scalar) == body(default, arch, scalar)
    plan = make_plan(LARGE["mace"], Direction.FORWARD, TARGETS["sm_80"], 4, kernel.tuning)
    assert program.number("tuned/sm_80/forward/float32/kernels") == len(plan.kernels)
    assert program.number("tuned/sm_80/forward/float32/0/threads") == plan.kernels[0].threads
    assert program.number("tuned/sm_80/forward/float32/0/shared_bytes") == plan.kernels[0].shared_bytes()
    assert precompiled.compile("cuda", "float32", "forward", "sm_86")["key"] == "precompiled-sm_80"


def test_the_winner_is_stored_and_used_again(
    races: list[int], cache_folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    first, second, plain = (TensorProductConv(SPEC).to(device) for _ in range(3))
    operands = random_operands(SPEC, 7, 40, dtype=dtype, device=device)
    found = warmup(first, tune=True, dtypes=dtype, directions=DIRECTIONS)
    assert [kernel.choice.gain for kernel in found.kernels] == [2.0] * 3
    assert not any(kernel.choice.stored for kernel in found.kernels)
    assert len(races) == 6
    assert all(runs == 2 for runs in races[1::2]), "the winner against the default alone"
    assert len(list(cache_folder.glob("tuned-*.json"))) == 3
    assert str(first.tuned[0].tuning) in repr(first)
    assert_product(first, operands)

    again = warmup(torch.nn.ModuleList([second]), tune=True, dtypes=dtype, directions=DIRECTIONS)
    assert len(races) == 6, "nothing is timed again"
    assert all(kernel.choice.stored for kernel in again.kernels)
    assert [k.choice.tuning for k in again.kernels] == [k.choice.tuning for k in found.kernels]
    assert (second.key, second.tuned) == (first.key, first.tuned)

    assert all(kernel.choice is None for kernel in warmup(plain, dtypes=dtype).kernels)
    assert plain.key == TensorProductConv(SPEC).key != first.key, "a stored choice is used by those who tune"


def test_a_warm_cache_needs_no_compiler(races: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = TensorProductConv(SPEC), TensorProductConv(SPEC)
    warmup(first, tune=True, directions="forward")
    monkeypatch.setenv("EQACCEL_CXX", "/nonexistent/c++")
    (kernel,) = warmup(second, tune=True, directions="forward").kernels
    assert (kernel.cached, kernel.choice.stored, second.key) == (True, True, first.key)
    with pytest.raises(MissingCompilerError, match="EQACCEL_CXX names"):
        warmup(second, tune=True, directions="backward")


def test_another_version_searches_again(races: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    warmup(TensorProductConv(SPEC), tune=True, directions="forward")
    monkeypatch.setattr(eqaccel, "__version__", "99.0")
    (kernel,) = warmup(TensorProductConv(SPEC), tune=True, directions="forward").kernels
    assert not kernel.choice.stored


def test_the_table_says_what_was_tuned(races: list[int]) -> None:
    module = TensorProductConv(SPEC)
    lines = str(warmup(module, tune=True)).splitlines()
    assert lines[1].split() == ["kernel", "direction", "dtype", "device", "seconds", "plan"]
    assert lines[2].endswith(f"{module.tuned[1].tuning}: 2.00x (timed)")
    assert lines[3].endswith(f"{module.tuned[0].tuning}: 2.00x (timed)")
    assert str(warmup(module, tune=True)).splitlines()[2].endswith(": 2.00x (stored)")
    assert str(warmup(module)).splitlines()[1].split()[-1] == "seconds"


def test_a_default_that_is_best_stays(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    module = TensorProductConv(SPEC).to(device)
    key = module.key
    for times in ([1.0, 1.1], [1.0, 0.98]):  # slower, and faster by less than what counts
        monkeypatch.setattr(tuning, "medians", lambda runs, _, times=times: (times * len(runs))[: len(runs)])
        for stored in (False, True):
            (kernel,) = warmup(module, tune=True, directions="forward").kernels
            assert kernel.choice == tuning.Choice(None, 1.0, stored)
            assert (module.key, module.tuned) == (key, ())
        for record in runtime.record_names("tuned-"):
            (Path(runtime.cache_dir()) / f"{record}.json").unlink()


def test_a_kernel_goes_back_to_the_default(races: list[int]) -> None:
    module = TensorProductConv(SPEC)
    key = module.key
    warmup(module, tune=True)
    backward, forward = module.tuned
    module.retune([TunedKernel(forward.target, Direction.FORWARD, forward.scalar_bytes, None)])
    assert module.tuned == (backward,)
    module.retune([TunedKernel(backward.target, Direction.BACKWARD, backward.scalar_bytes, None)])
    assert (module.key, module.tuned) == (key, ())


@pytest.mark.parametrize("kind", [TensorProduct, TensorProductConv])
def test_a_race_on_the_clock(kind: type[torch.nn.Module], device: torch.device) -> None:
    module = kind(SPEC).to(device)
    result = warmup(module, tune=True, dtypes=torch.float32)
    assert all(k.choice.gain == 1 if k.choice.tuning is None else k.choice.gain > 1.03 for k in result.kernels)
    batch = kind is TensorProduct
    assert_product(module, random_operands(SPEC, 9, 9, batch=batch, dtype=torch.float32, device=device))


def test_copies_keep_what_was_tuned(races: list[int], device: torch.device, tmp_path: Path) -> None:
    module = TensorProductConv(SPEC).to(device)
    before = list(module.state_dict())
    warmup(module, tune=True, dtypes=torch.float32)
    assert list(module.state_dict()) == before
    o = random_operands(SPEC, 7, 40, dtype=torch.float32, device=device)
    arguments = (o.x, o.y, o.w, o.edge_index)
    expected = module(*arguments)
    torch.jit.script(module).save(tmp_path / "module.pt")
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.jit.script(module),
        torch.jit.load(tmp_path / "module.pt"),
        copy.deepcopy(module).to("cpu").to(device),
    ]
    for other in copies:
        assert other.key == module.key
        assert torch.equal(other.payload, module.payload)
        assert torch.equal(other(*arguments), expected)
    assert copies[0].tuned == copies[1].tuned == module.tuned
    other = warmup(copies[0].double(), dtypes=torch.float64)
    assert other.kernels[0].choice is None, "what was tuned in float32 says nothing about float64"


def test_compiled_modules_are_tuned_too(races: list[int]) -> None:
    module = TensorProductConv(SPEC)
    compiled = torch.compile(module, backend="eager")
    o = random_operands(SPEC, 7, 40, dtype=torch.float32)
    compiled(o.x, o.y, o.w, o.edge_index)
    warmup(compiled, tune=True, dtypes=torch.float32)
    assert module.tuned
    z = compiled(o.x, o.y, o.w, o.edge_index)
    assert torch.equal(z, module(o.x, o.y, o.w, o.edge_index))


def test_precompiled_kernels_are_the_tuned_ones(races: list[int]) -> None:
    module = TensorProductConv(SPEC)
    warmup(module, tune=True, dtypes=torch.float32)
    targets = (host_target().name,)
    tuned = precompiled_entries(module.family, SPEC, "float32", targets, module.tuned)
    assert tuned != precompiled_entries(module.family, SPEC, "float32", targets)
    precompiled = runtime.Program(module.payload.numpy().tobytes() + tuned)
    assert precompiled.compile("cpu", "float32", "forward")["key"] == f"precompiled-{targets[0]}"
    assert precompiled.source("cpu", "float32", "forward") == runtime.find_program(module.key).source(
        "cpu", "float32", "forward"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"gain": 2}',
        b'{"tuning": {"stages": 99}, "gain": 2}',
        b'{"tuning": {"colour": 1}, "gain": 2}',
        b'{"tuning": {"accumulators": -1}, "gain": 2}',
        b'{"tuning": 7, "gain": 2}',
        b'{"tuning": null, "gain": "much"}',
    ],
)
def test_a_damaged_record_is_searched_again(content: bytes, races: list[int], cache_folder: Path) -> None:
    warmup(TensorProductConv(SPEC), tune=True, directions="forward")
    (record,) = cache_folder.glob("tuned-*.json")
    stored = json.loads(record.read_text())
    assert stored["gain"] == 2.0
    if content.startswith(b"{"):  # right as a record, and no choice between plans
        runtime.write_record(record.stem, json.loads(content))
    else:
        record.write_bytes(content)
    with pytest.warns(CacheWarning, match="is ignored, because it") as caught:
        warmup(TensorProductConv(SPEC), tune=True, directions="forward")
    assert len(caught) == 1
    assert len(races) == 4
    assert json.loads(record.read_text()) == stored


def test_a_changed_digit_of_a_record_is_noticed(cache_folder: Path) -> None:
    runtime.write_record("tuned-one", {"tuning": {"stages": 2}, "gain": 1.25})
    content = (cache_folder / "tuned-one.json").read_bytes()
    for position in range(len(content)):
        for changed in (content[:position] + content[position + 1 :], content[:position] + b"3" + content[position:]):
            (cache_folder / "tuned-one.json").write_bytes(changed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CacheWarning)
                record = runtime.read_record("tuned-one")
            assert record in (None, {"tuning": {"stages": 2}, "gain": 1.25})


def test_a_cache_that_cannot_be_written(races: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="is not kept: can not write to the cache folder .*Not a directory"):
        runtime.write_record("tuned-none", {})
    with pytest.warns(CacheWarning, match="is ignored, because it cannot be read"):
        assert runtime.read_record("tuned-none") is None
    assert runtime.record_names("tuned-") == []


def test_wrong_kernels_do_not_win(races: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    scales = TensorProductTask.scales
    monkeypatch.setattr(TensorProductTask, "scales", lambda *arguments: [-1 - scale for scale in scales(*arguments)])
    module = TensorProductConv(SPEC)
    with pytest.warns(TuningWarning, match="forward kernel with accumulators=.* is left out: its results differ"):
        (kernel,) = warmup(module, tune=True, directions="forward").kernels
    assert kernel.choice.tuning is None
    assert races == [1]
    assert module.tuned == ()


def test_the_environment_asks_for_tuning(races: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = TensorProductConv(SPEC)
    monkeypatch.setenv("EQACCEL_TUNE", "1")
    assert warmup(module, tune=False, directions="forward").kernels[0].choice is None
    assert not races
    assert warmup(module, directions="forward").kernels[0].choice.gain == 2.0
    monkeypatch.setenv("EQACCEL_TUNE", "0")
    assert warmup(TensorProductConv(SPEC), directions="forward").kernels[0].choice is None
    monkeypatch.setenv("EQACCEL_TUNE", "perhaps")
    with pytest.raises(SettingsError, match="EQACCEL_TUNE: expected 1 or 0, got 'perhaps'"):
        warmup(module)


def test_a_patched_model_keeps_its_forces(
    races: list[int], monkeypatch: pytest.MonkeyPatch, device: torch.device, tmp_path: Path
) -> None:
    pytest.importorskip("mace")
    import mace_models
    from patch_checks import assert_close

    # Degrees as usual: products of fewer paths leave nothing to choose. Kernels of the other modules are few and small.
    small = {"hidden_irreps": "8x0e", "correlation": 1, "radial_MLP": [8]}
    model = mace_models.energy_model(**small).to(device)
    keys = list(model.state_dict())
    batch = mace_models.batch(model)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        out = model({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
        return out["energy"].detach(), out["forces"].detach()

    expected = results()
    eqaccel.patch(model, verify=False)
    products = [module for module in model.modules() if isinstance(module, TensorProductConv)]
    assert not races
    assert not any(module.tuned for module in products), "the default follows from the model alone"
    eqaccel.unpatch(model)
    monkeypatch.setenv("EQACCEL_TUNE", "1")
    eqaccel.patch(model)
    products = [module for module in model.modules() if isinstance(module, TensorProductConv)]
    assert races
    assert any(module.tuned for module in products)
    assert list(model.state_dict()) == keys
    for value, wanted in zip(results(), expected, strict=True):
        assert_close(value, wanted)
    # The file is compared with the model before it is kept.
    eqaccel.export(model, tmp_path / "plain.pt")
    eqaccel.export(model, tmp_path / "precompiled.pt", device="cpu", precompile=[host_target().name])
    eqaccel.unpatch(model)
    for value, wanted in zip(results(), expected, strict=True):
        assert_close(value, wanted)


def test_refusals() -> None:
    with pytest.raises(WarmupError, match=r"devices: expected devices of this machine .* 'sm_90'; .* tune=False"):
        warmup(TensorProductConv(SPEC), tune=True, devices=["sm_90"])
    with pytest.raises(WarmupError, match="model: expected Python modules to tune, got a RecursiveScriptModule at"):
        warmup(torch.jit.script(TensorProductConv(SPEC)), tune=True)
    with pytest.raises(WarmupError, match=r"devices: expected one of .* GPUs .*, got 'cuda:99'"):
        warmup(TensorProductConv(SPEC), tune=True, devices="cuda:99")


def test_doctor_counts_tuned_kernels(races: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    warmup(TensorProductConv(SPEC), tune=True)
    assert main(["doctor"]) == 0
    assert "  tuned kernels   2\n" in capsys.readouterr().out

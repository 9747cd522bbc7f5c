"""Training on two ranks by DistributedDataParallel, on two GPUs if there are: gradients as of the plain model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import mace_models  # first: imports mace before e3nn
import torch
import torch.distributed
import torch.multiprocessing
from patch_checks import assert_same_gradients
from torch.nn.parallel import DistributedDataParallel

import eqaccel

RANKS = 2


def train_other(number: int, folder: Path, device: str) -> None:
    """What the ranks after 0, the process of the test, do."""
    train(number + 1, folder, device)


def train(rank: int, folder: Path, device: str) -> None:
    """What a rank does: two steps on the structure that is its part, plain and patched. Rank 0 writes gradients."""
    backend = "gloo"  # which ranks may share a GPU with
    if device == "cuda" and torch.cuda.device_count() >= RANKS:
        backend, device = "nccl", f"cuda:{rank}"
        torch.cuda.set_device(rank)
    limit = timedelta(minutes=5)  # of waiting for a rank that has failed
    torch.distributed.init_process_group(backend, f"file://{folder}/ranks", limit, RANKS, rank)
    gradients = []
    for is_patched in (False, True):
        model = mace_models.energy_model(**mace_models.TINY).to(device)
        if is_patched:
            eqaccel.patch(model, verify=False)
        own = mace_models.batch(model, [mace_models.structures()[rank]])
        # Weights that no atom of a rank uses are waited for otherwise.
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            output = parallel(dict(own), training=True, compute_force=True)
            (output["energy"].square().sum() + output["forces"].square().sum()).backward()
            optimizer.step()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    torch.distributed.destroy_process_group()


def test_gradients_are_those_of_the_plain_model(tmp_path: Path, device: torch.device) -> None:
    others = torch.multiprocessing.spawn(train_other, (tmp_path, device.type), nprocs=RANKS - 1, join=False)
    train(0, tmp_path, device.type)
    while not others.join():
        pass
    plain, patched = torch.load(tmp_path / "gradients.pt", map_location="cpu")
    assert list(patched) == list(plain)
    assert_same_gradients(tuple(patched.values()), tuple(plain.values()))
    assert any(gradient is not None and bool(gradient.any()) for gradient in plain.values())

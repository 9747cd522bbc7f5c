"""Potentials as AOTInductor packages: compiled code for one kind of machine, for systems without ghosts."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from eqaccel.errors import ExportError
from eqaccel.integrations.export import interpreter

SMALLEST = 2
"""Fewest atoms, and fewest edges, that a package accepts: torch.export treats the sizes 0 and 1 apart."""


def compile_package(
    potential: torch.jit.ScriptModule, path: Path, dtype: torch.dtype, metadata: dict[str, str]
) -> None:
    """Compiles a scripted `Potential` to a package with the inputs (vectors, edge_index, types).

    Args:
        potential: On the CPU. What it gives is traced, energies and gradient in one graph.
        path: File to write, ending in ".pt2".
        dtype: Floating-point type of the potential.
        metadata: Entries for the metadata of the package.

    Raises:
        ExportError: If the potential holds an operation that cannot be traced.
    """
    frozen = torch.jit.freeze(potential.eval(), preserved_attrs=["node_energies"], optimize_numerics=False)
    graph = frozen.node_energies.graph
    torch._C._jit_pass_inline(graph)

    constants = potential.constants

    def energies_and_gradient(vectors: Tensor, edge_index: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        leaf = vectors.detach().requires_grad_(True)
        energies = interpreter.run(graph, [frozen, leaf, edge_index, types, types.size(0), 0])
        return energies.detach().to(torch.float64) + constants[types], torch.autograd.grad(energies.sum(), leaf)[0]

    # Sizes of the example that nothing else in a model has, because equal sizes are taken for the same one.
    num_nodes, num_edges = 37, 71
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(num_edges, 3, generator=generator, dtype=dtype)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    example = (vectors, edge_index, torch.zeros(num_nodes, dtype=torch.int64))
    nodes, edges = (torch.export.Dim(name, min=SMALLEST) for name in ("num_nodes", "num_edges"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced = make_fx(energies_and_gradient, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
        except NotImplementedError as error:
            raise ExportError(
                f"model: cannot be traced, because it uses the {error}, which the tracer does not know; export it in "
                "format 'torchscript'"
            ) from error
        traced.graph.eliminate_dead_code()  # what is left of unused expansions would fix the number of edges
        traced.recompile()
        program = torch.export.export(traced, example, dynamic_shapes=({0: edges}, {1: edges}, {0: nodes}))
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": metadata}
        )

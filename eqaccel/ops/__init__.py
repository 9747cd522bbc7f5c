"""The torch surface: operators `torch.ops.eqaccel.*`, the modules that call them, and the graph they run on.

Takes tensors and the spec of a kernel family; gives differentiable results. Importing this room imports torch and loads
the operator library. Knows torch, specs and payloads; must not know models, e3nn, or how a kernel is written.
"""

from eqaccel.ops.edge_pairs import EdgePairs
from eqaccel.ops.gate import Gate
from eqaccel.ops.graph import GivenEdges, Graph, computed_once, depend_on_lengths, given_edges
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import library_path, load_library
from eqaccel.ops.linear import Linear
from eqaccel.ops.matrix_product import MatrixProduct, has_matrix_kernel
from eqaccel.ops.modules import TensorProduct, TensorProductConv
from eqaccel.ops.morton import morton_order
from eqaccel.ops.neighbors import CandidateTensors, EdgeTensors, NeighborKernels, Neighbors
from eqaccel.ops.pair_convolution import LastProduct, convolve_pairs
from eqaccel.ops.pieces import EdgeWeights, convolve_in_pieces
from eqaccel.ops.polynomial import Polynomial
from eqaccel.ops.portions import MemoryLimits, Portions, WeightLimits
from eqaccel.ops.programs import ProgramUse, given_to_programs
from eqaccel.ops.radial_basis import RadialBasis
from eqaccel.ops.radial_layer import RadialLayer
from eqaccel.ops.radial_network import RadialNetwork
from eqaccel.ops.silu import ScaledSilu
from eqaccel.ops.weights import reorder_weights_from_e3nn, reorder_weights_to_e3nn

__all__ = [
    "CandidateTensors",
    "EdgePairs",
    "EdgeTensors",
    "EdgeWeights",
    "Gate",
    "GivenEdges",
    "Graph",
    "KernelModule",
    "LastProduct",
    "Linear",
    "MatrixProduct",
    "MemoryLimits",
    "NeighborKernels",
    "Neighbors",
    "Polynomial",
    "Portions",
    "ProgramUse",
    "RadialBasis",
    "RadialLayer",
    "RadialNetwork",
    "ScaledSilu",
    "TensorProduct",
    "TensorProductConv",
    "WeightLimits",
    "computed_once",
    "convolve_in_pieces",
    "convolve_pairs",
    "depend_on_lengths",
    "given_edges",
    "given_to_programs",
    "has_matrix_kernel",
    "library_path",
    "load_library",
    "morton_order",
    "reorder_weights_from_e3nn",
    "reorder_weights_to_e3nn",
]

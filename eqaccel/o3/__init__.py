"""The classes of `e3nn.o3` that eqaccel has kernels for, with the same arguments, weights and numbers.

`from eqaccel import o3` in the place of `from e3nn import o3` is enough: constructors, weights and their order, names
in state dicts, leading dimensions and broadcasting are those of e3nn, which need not be installed. `from_e3nn` makes a
module from one of e3nn's, with the same parameters. `Irreps` and `Irrep` are asked as e3nn's are, but for what
makes tensors (matrices of rotations, random rows), which stays e3nn's, as do all names that are not here.

Takes irreps and e3nn's instructions; gives modules that call the operators of `eqaccel.ops`. Knows e3nn's conventions;
must not know models, nor import e3nn.
"""

from eqaccel.irreps import Irrep, Irreps
from eqaccel.o3.harmonics import SphericalHarmonics, spherical_harmonics
from eqaccel.o3.linear import Linear
from eqaccel.o3.products import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorSquare,
)
from eqaccel.o3.tensor_product import TensorProduct

__all__ = [
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "Irrep",
    "Irreps",
    "Linear",
    "SphericalHarmonics",
    "TensorProduct",
    "TensorSquare",
    "spherical_harmonics",
]

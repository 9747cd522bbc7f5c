"""The models that can be timed whole, by the library that they are of, and what a benchmark asks of such a library.

MACE needs another version of e3nn than NequIP and SevenNet do, so that no environment has all of them: each is imported
by a file of its own, when a model of it is timed.
"""

from __future__ import annotations

import argparse
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:  # the command line has to answer without it
    import ase

Variant = Callable[[torch.nn.Module, str], torch.nn.Module]
"""Makes another model, that computes the same, out of a plain one and the device that it is on."""


class ModelCase(ABC):
    """A model with random, frozen weights, and a structure that it is run on.

    Attributes:
        variants: What makes a model with each library out of a plain one, as its users do.
        plain: The model as its own library builds it, on e3nn.
        exact: The model whose energy and forces count as right; may be the plain one.
        inputs: What the models are called with; "edge_index" is among it.
        atoms: Number of atoms.
    """

    variants: ClassVar[Mapping[str, Variant]]

    def __init__(
        self, plain: torch.nn.Module, exact: torch.nn.Module, inputs: Mapping[str, Tensor], atoms: int
    ) -> None:
        self.plain, self.exact, self.inputs, self.atoms = plain, exact, inputs, atoms

    @staticmethod
    @abstractmethod
    def sizes(model: str, device: str) -> Sequence[int]:
        """Numbers of atoms that a model is timed on unless others are asked for."""

    @staticmethod
    @abstractmethod
    def systems(model: str, device: str) -> Sequence[str]:
        """Names of the systems that a model simulates unless others are asked for."""

    @staticmethod
    @abstractmethod
    def training_systems(model: str) -> Sequence[str]:
        """Names of the systems that a model is trained on unless others are asked for."""

    @staticmethod
    @abstractmethod
    def plain_model(model: str, options: argparse.Namespace) -> torch.nn.Module:
        """A model, by its name, as its own library builds it, on the CPU."""

    @staticmethod
    @abstractmethod
    def multiply_energies(model: torch.nn.Module, factor: float) -> None:
        """Multiplies what a model adds to the energies of lone atoms, and so its forces."""

    @staticmethod
    @abstractmethod
    def calculator(model: torch.nn.Module, device: str, compiled: bool = False) -> Any:
        """The library's own ASE calculator of a model, compiled by the library's own option or not.

        Raises:
            NotImplementedError: If it has no such option.
        """

    @staticmethod
    @abstractmethod
    def working_dtype(dtype: torch.dtype) -> torch.dtype:
        """What torch's default has to be while calculators of models of a dtype work."""

    @classmethod
    @abstractmethod
    def build(cls, model: str, atoms: int, options: argparse.Namespace) -> ModelCase:
        """A model, by its name, on a structure of about so many atoms."""

    @classmethod
    def exact_model(cls, model: str, plain: torch.nn.Module, options: argparse.Namespace) -> torch.nn.Module:
        """A model, by its name, in float64: with the weights of a plain one, and constants that never were float32."""
        exact = cls.plain_model(model, argparse.Namespace(**{**vars(options), "dtype": "float64"}))
        with torch.no_grad():
            for wide, rounded in zip(exact.parameters(), plain.parameters(), strict=True):
                wide.copy_(rounded)
        return exact

    @staticmethod
    @abstractmethod
    def batch(model: torch.nn.Module, structures: Sequence[ase.Atoms], dtype: torch.dtype) -> dict[str, Tensor]:
        """What a model is called with for several structures at once; on the CPU."""

    @staticmethod
    @abstractmethod
    def evaluate(model: torch.nn.Module, inputs: dict[str, Tensor], training: bool = False) -> dict[str, Tensor]:
        """Outputs of a variant of the model, "energy" and "forces" among them; forces to derive, in training."""

    @abstractmethod
    def products(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules, layer by layer, that `patch` replaces; of the plain or the patched model."""

    @staticmethod
    def operands(product: torch.nn.Module, *given: Any) -> Sequence[Tensor]:
        """Features of nodes, attributes of edges and weights, out of what one of the products was called with."""
        return given[:3]

    @abstractmethod
    def convolve(self, product: torch.nn.Module, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        """The convolution that the model uses one of its products for."""

    def call(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Evaluates on fresh tensors, as in every step of a simulation: edges are sorted anew each time."""
        return self.evaluate(model, {name: value.clone() for name, value in self.inputs.items()})


@dataclass(frozen=True)
class Family:
    """The models of one library.

    Attributes:
        title: What people call it.
        package: What is imported.
        models: Names on the command line.
        environment: What `./run shell` calls the environment that has it; the name of the package if None.
    """

    title: str
    package: str
    models: tuple[str, ...]
    environment: str | None = None

    def short(self, model: str) -> str:
        """The name of a model without that of the library."""
        return model.removeprefix(f"{self.title.lower()}-")

    def load(self) -> type[ModelCase]:
        """Imports the library.

        Raises:
            ImportError: If it is not installed; says where it is.
        """
        try:
            return importlib.import_module(f"eqaccel.benchmarks.{self.package}_like").Case
        except ImportError as missing:
            use = f"use an environment with {self.package}: ./run shell {self.environment or self.package}"
            raise ImportError(f"{missing}; {use}") from missing


FAMILIES: dict[str, Family] = {
    model: family
    for family in (
        Family("MACE", "mace", ("mp0-medium", "large", "alloy")),
        Family("NequIP", "nequip", ("nequip-water", "nequip-l", "nequip-m")),
        Family("SevenNet", "sevenn", ("sevennet-0", "sevennet-l3i5"), environment="nequip"),
    )
    for model in family.models
}
"""The family of every model."""

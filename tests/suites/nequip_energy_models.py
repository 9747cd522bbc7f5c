"""NequIP's own tests of energy models, which come with its package, on models like those that its builders make.

Run by `run.py`, with and without eqaccel; `pytest tests` does not collect it.
"""

from __future__ import annotations

from typing import Any

import pytest
from nequip.utils.unittests.conftest import *  # noqa: F403
from nequip.utils.unittests.model_tests_basic import EnergyModelTestsMixin

# NequIP's test of isolated atoms is made for models of three types.
_COMMON = {
    "seed": 7,
    "type_names": ["H", "C", "O"],
    "r_max": 4.0,
    "avg_num_neighbors": 12.0,
    "radial_mlp_width": 8,
}
_ISOLATED = {"per_type_energy_shifts": {"H": 1.5, "C": -2.25, "O": 0.5}}
CONFIGS = {
    "even": {"num_layers": 2, "l_max": 1, "parity": False, "num_features": 8},
    "both-parities": {"num_layers": 3, "l_max": 2, "parity": True, "num_features": [8, 6, 4], **_ISOLATED},
    "scaled": {
        "num_layers": 2,
        "l_max": 2,
        "parity": True,
        "num_features": 5,
        "per_type_energy_scales": {"H": 0.5, "C": 1.5, "O": 2.0},
        "per_type_energy_scales_trainable": True,
        "per_type_energy_shifts_trainable": True,
        "pair_potential": {
            "_target_": "nequip.nn.pair_potential.ZBL",
            "units": "metal",
            "chemical_species": ["H", "C", "O"],
        },
        **_ISOLATED,
    },
    "cutoffs": {
        "num_layers": 3,
        "l_max": 1,
        "parity": True,
        "num_features": 4,
        "per_edge_type_cutoff": {"H": 2.0, "C": {"H": 4.0, "C": 3.5, "O": 3.7}, "O": 3.9},
    },
}


class Models:
    """What NequIP's tests ask a subclass for."""

    @pytest.fixture
    def strict_locality(self) -> bool:
        return False

    @pytest.fixture(scope="class", params=list(CONFIGS))
    @classmethod
    def config(cls, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"_target_": "nequip.model.NequIPGNNModel", **_COMMON, **CONFIGS[request.param]}


class TestModels(Models, EnergyModelTestsMixin):
    pass

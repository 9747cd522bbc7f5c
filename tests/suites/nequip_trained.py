"""NequIP's own tests of models that `nequip-train` has trained, packaged and compiled, which come with its package.

Run by `run.py`, with and without eqaccel; `pytest tests` does not collect it.
"""

from __future__ import annotations

from nequip.utils.unittests.conftest import *  # noqa: F403
from nequip.utils.unittests.model_tests import BaseEnergyModelTests
from nequip.utils.unittests.model_tests_basic import EnergyModelTestsMixin
from nequip.utils.unittests.model_tests_torchsim import TorchSimIntegrationMixin
from nequip_energy_models import Models


class TestTrained(Models, BaseEnergyModelTests, TorchSimIntegrationMixin):
    pass


for _name in dir(EnergyModelTestsMixin):  # `nequip_energy_models.py` runs these
    if _name.startswith("test_"):
        setattr(TestTrained, _name, None)

"""Builders of models that build each model once: libraries take a second to build what is copied in a tenth of one."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from e3nn import get_optimization_defaults
from remembered import compute_moments_once

from eqaccel.patches.copying import duplicated

compute_moments_once()
_Arguments = ParamSpec("_Arguments")


def built_once(build: Callable[_Arguments, torch.nn.Module]) -> Callable[_Arguments, torch.nn.Module]:
    """The same builder, each call of which gets a copy, and leaves torch's random numbers as building leaves them.

    Args:
        build: Its arguments can be pickled, and with torch's and e3nn's defaults they determine the model.
    """
    kept: dict[bytes, tuple[torch.nn.Module, torch.Tensor]] = {}

    @functools.wraps(build)
    def copied(*args: _Arguments.args, **options: _Arguments.kwargs) -> torch.nn.Module:
        defaults: Any = (torch.get_default_dtype(), get_optimization_defaults())
        key = pickle.dumps((args, options, defaults))
        if key not in kept:
            kept[key] = build(*args, **options), torch.get_rng_state()
        model, random_state = kept[key]
        torch.set_rng_state(random_state)
        return duplicated(model)

    return copied

"""Steps of training, recorded: `capture` has calls of a patched model, and their backward passes, run as CUDA graphs.

Takes a model that `eqaccel.patch` has patched; the loop around it stays as it is. Knows `Training` of a kind of model,
which says how its models are called; must not know models, losses, optimizers or data loaders.
"""

from eqaccel.training.recorder import Recorder, capture

__all__ = ["Recorder", "capture"]

"""Use a model while it is being trained, without any effect on its training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import evaluated


@contextmanager
def beside_training(model: Decoder) -> Iterator[None]:
    """Run the model eagerly and as its checkpoint would, inside the `with` block, and leave it out of peak memory.

    Eagerly, so that no block is recompiled for other shapes than those of training.
    """
    try:
        with torch.compiler.set_stance("force_eager"), evaluated(model):
            yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # a run's peak memory is that of its training steps

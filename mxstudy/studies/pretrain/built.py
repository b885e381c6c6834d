"""Build what a pre-training's numbers depend on from its config: the model, and the order of its samples."""

from __future__ import annotations

from mxstudy.config import Pretrain, blend_of
from mxstudy.data.sampling import Sampling
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES


def sampling_of(config: Pretrain) -> Sampling:
    """Return which corpus each sample is taken from. Raises ConfigError for a phase or a corpus that gets none."""
    return Sampling(blend_of(config.data), config.train.steps, config.train.batch_size, config.data_seed)


def build_model(config: Pretrain) -> Decoder:
    return Decoder(config.model, config.norm, config.precision.settings, DTYPES[config.train.compute])

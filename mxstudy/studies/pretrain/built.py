"""Build a pre-training's model from its config, count its parameters, and decide the order of its samples."""

from __future__ import annotations

from mxstudy.config import Pretrain, blend_of
from mxstudy.data.sampling import Sampling
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES
from mxstudy.tracking.journal import Row


def sampling_of(config: Pretrain) -> Sampling:
    """Return which corpus each sample is taken from. Raises ConfigError for a phase or a corpus that gets none."""
    return Sampling(blend_of(config.data), config.train.steps, config.train.batch_size, config.data_seed)


def build_model(config: Pretrain) -> Decoder:
    return Decoder(config.model, config.norm, config.precision.settings, DTYPES[config.train.compute])


def parameters_of(model: Decoder) -> Row:
    """Return the number of parameters; of a mixture of experts also of the weights that a token is multiplied with."""
    active = {"active_matmul_parameters": model.num_matmul_params()} if model.idle_params else {}
    return {"parameters": model.num_params()} | active


def size_text(counted: Row) -> str:
    """Return the counts of `parameters_of` as text."""
    active = counted.get("active_matmul_parameters")
    of_a_token = f" ({active / 1e6:,.1f} M active in matrix products)" if active else ""
    return f"{counted['parameters'] / 1e6:,.1f} M parameters{of_a_token}"

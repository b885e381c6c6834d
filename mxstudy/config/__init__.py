"""The schema of every run: frozen dataclasses and their validation. Standard library only."""

from mxstudy.config.data import Bytes, Corpus, Data, Files, HuggingFace, Pretrained, PySource, Tokenizer, TrainedBPE
from mxstudy.config.model import Decoder, LayerNorm, MXNorm, Norm, PostRoundMXNorm, Precision, PrecisionRow, RMSNorm
from mxstudy.config.observation import (
    ActivationHistograms,
    GradientBias,
    NormOutputRMS,
    Probes,
    Saturation,
    Tracking,
)
from mxstudy.config.run import SCHEMA_VERSION, STUDIES, Approximation, Pretrain, Run, fingerprint, hashed, read_run
from mxstudy.config.training import AdamW, Checkpoint, Schedule, Train, Validation

__all__ = [
    "SCHEMA_VERSION",
    "STUDIES",
    "ActivationHistograms",
    "AdamW",
    "Approximation",
    "Bytes",
    "Checkpoint",
    "Corpus",
    "Data",
    "Decoder",
    "Files",
    "GradientBias",
    "HuggingFace",
    "LayerNorm",
    "MXNorm",
    "Norm",
    "NormOutputRMS",
    "PostRoundMXNorm",
    "Precision",
    "PrecisionRow",
    "Pretrain",
    "Pretrained",
    "Probes",
    "PySource",
    "RMSNorm",
    "Run",
    "Saturation",
    "Schedule",
    "Tokenizer",
    "Tracking",
    "Train",
    "TrainedBPE",
    "Validation",
    "fingerprint",
    "hashed",
    "read_run",
]

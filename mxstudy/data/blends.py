"""The corpora of a training, one or several: their identities, their shards, and the one tokenizer of all.

A BPE is trained on the corpus with the largest weight in the first phase, and encodes the others too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mxstudy import config
from mxstudy.config import blend_of
from mxstudy.data import corpus, shards
from mxstudy.data import tokenizer as tokenization
from mxstudy.data.build_shards import OnCounts, Report, ignore_counts
from mxstudy.data.content_hash import Split
from mxstudy.data.shards import Shards
from mxstudy.reader import ConfigError, key_in, require


def identity(data: config.TrainingData, tokenizer: config.Tokenizer) -> dict[str, Any]:
    """Return what determines the tokens, as plain data: a corpus's identity, or that of each, and the tokenizer's."""
    found = {}
    for name, one in blend_of(data).corpora.items():
        with keys_of(data, name):
            found[name] = corpus.identity(one)
    check_divided(found)
    of_all = {"kind": data.kind, "corpora": found} if isinstance(data, config.Blend) else found[data.kind]
    return of_all | {"tokenizer": tokenization.identity(tokenizer)}


def check_divided(identities: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if a corpus trains on a whole text file, and another one keeps a part of it for validation.

    The hashes of text files are compared. Whether a row of a JSONL or Parquet file is that text is not known here.
    """
    divided = {one["sha256"][0]: name for name, one in identities.items() if "split" in one}
    for name, one in identities.items():
        for sha256 in one["sha256"] if one["kind"] == "files" and "split" not in one else ():
            require(
                sha256 not in divided,
                f"data.corpora: {name} has a text of which {divided.get(sha256)} keeps the last part for validation; "
                "leave it out of one of them",
            )


def check(data: config.TrainingData, tokenizer: config.Tokenizer, cache_dir: Path) -> None:
    """Raise ConfigError for a corpus that is neither prepared nor available with text."""
    folders = locate(data, tokenizer, cache_dir)
    for name, one in blend_of(data).corpora.items():
        if name not in folders or not os.path.exists(folders[name]):  # Path.exists raises for a long name
            with keys_of(data, name):
                corpus.check(one)


def locate(data: config.TrainingData, tokenizer: config.Tokenizer, cache_dir: Path) -> dict[str, Path]:
    """Return the folder of the shards of each corpus, whether it exists or not.

    As long as a BPE has not been trained, there is only the folder of the corpus that it is going to be trained on.
    """
    folders: dict[str, Path] = {}
    for name, one in in_order(blend_of(data)).items():
        with keys_of(data, name):
            folders[name] = shards.locate(one, tokenizer, cache_dir)[0]
        if isinstance(tokenizer, config.TrainedBPE) and not os.path.exists(folders[name]):
            break
        tokenizer = trained(tokenizer, folders[name])
    return folders


def prepare(
    data: config.TrainingData,
    tokenizer: config.Tokenizer,
    cache_dir: Path,
    report: Report,
    workers: int = 0,
    on_counts: OnCounts = ignore_counts,
) -> Iterator[tuple[str, Shards]]:
    """Yield each corpus's name and shards, as `mxstudy.data.shards.prepare` makes or opens them."""
    for name, one in in_order(blend_of(data)).items():
        with keys_of(data, name):
            found = shards.prepare(one, tokenizer, cache_dir, report, workers, on_counts)
        tokenizer = trained(tokenizer, found.folder)
        yield name, found


def in_order(blend: config.Blend) -> dict[str, config.Data]:
    """Return the corpora in the order of their preparation: first the one that trains the BPE, then others by name."""
    weights = blend.phases[0].weights
    return {name: blend.corpora[name] for name in sorted(blend.corpora, key=lambda name: (-weights.get(name, 0), name))}


def trained(tokenizer: config.Tokenizer, folder: Path) -> config.Tokenizer:
    """Return the tokenizer of all further corpora. A BPE is the one that was trained for the first corpus's shards."""
    if not isinstance(tokenizer, config.TrainedBPE):
        return tokenizer
    return config.Pretrained(name=str(folder / "tokenizer.json"), eos_token=tokenization.EOS)


@contextmanager
def keys_of(data: config.TrainingData, name: str) -> Iterator[None]:
    """Replace the key `data` by that of the corpus in a ConfigError of the block, if the corpus is part of a blend."""
    try:
        yield
    except ConfigError as error:
        if not isinstance(data, config.Blend) or not str(error).startswith(("data.", "data:")):
            raise
        raise ConfigError(f"{key_in('data.corpora', name)}{str(error).removeprefix('data')}") from error


def manifest_of(prepared: Mapping[str, Shards]) -> dict[str, Any]:
    """Return what the shards hold: the manifest of one corpus, or the manifests of several under `corpora`."""
    manifests = {name: one.manifest for name, one in sorted(prepared.items())}
    return {"corpora": manifests} if len(manifests) > 1 else next(iter(manifests.values()))


def manifests_in(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the manifests of all corpora in what `manifest_of` returned."""
    return list(manifest.get("corpora", {"": manifest}).values())


def unigram_entropy_nats(prepared: Mapping[str, Shards], weights: Mapping[str, float], split: Split) -> float:
    """Return the entropy of the token frequencies of a split, nats: the best loss of a model without context.

    `weights`: each corpus's share of the split, in any unit.
    """
    whole = sum(weights.values())
    chosen = {name: weight / whole for name, weight in weights.items() if weight}
    parts = [weight * prepared[name].unigram_frequencies(split) for name, weight in chosen.items()]
    mixed = np.sum(parts, axis=0)
    p = mixed[mixed > 0]
    return float(-(p * np.log(p)).sum())

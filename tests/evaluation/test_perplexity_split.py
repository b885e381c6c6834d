"""A share of a corpus counts as held out only as far as the checkpoint was trained without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mxstudy import config
from mxstudy.evaluation.checkpoints import describe, find
from mxstudy.reader import ConfigError
from mxstudy.studies.perplexity.check import check_split
from mxstudy.tracking.folder import RunFolder

pytestmark = pytest.mark.integration
LARGER = r"^data\.validation_fraction: 0\.03 is more than the 0\.02 that .*step_00000010 was trained without; "


def test_a_larger_share_than_was_held_out_is_refused(trained: RunFolder) -> None:
    what = describe(find(str(trained.path), Path("runs")))

    def asked(split: str, data: config.Data) -> None:
        check_split(config.Perplexity(checkpoint="", data=data, split=split), what)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=LARGER + r"use data\.validation_fraction=0\.02"):
        asked("validation", config.PySource(validation_fraction=0.03))
    for fraction in (0.01, 0.02):
        asked("validation", config.PySource(validation_fraction=fraction))
    asked("train", config.PySource(validation_fraction=0.03))
    elsewhere = config.Files(format="text", paths=("a",), validation_fraction=0.03)
    asked("validation", elsewhere)
    with pytest.raises(ConfigError, match=r"^data\.validation_fraction: 0\.03 has no effect, because split=all"):
        asked("all", elsewhere)
    asked("all", replace(elsewhere, validation_fraction=0.02))


def test_each_corpus_of_a_blend_counts(trained: RunFolder) -> None:
    files = config.Files(format="text", paths=("a.txt",))
    corpora: dict[str, config.Data] = {"python": config.PySource(), "own": files}
    blend = config.Blend(corpora=corpora, phases=(config.Phase(weights={"python": 1, "own": 1}),))
    what = replace(describe(find(str(trained.path), Path("runs"))), data=blend)
    for corpus in corpora.values():
        with pytest.raises(ConfigError, match=LARGER):
            check_split(config.Perplexity(checkpoint="", data=replace(corpus, validation_fraction=0.03)), what)
    check_split(config.Perplexity(checkpoint="", data=config.HuggingFace(name="a/b", validation_fraction=0.03)), what)

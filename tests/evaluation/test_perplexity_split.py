"""A share of a corpus counts as held out only as far as the checkpoint was trained without it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from each import each

from mxstudy import config
from mxstudy.data.corpus import identity
from mxstudy.evaluation.checkpoints import Trained, describe, find
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


CUT, HASHED, NAMED = ["a.txt"], ["a.txt", "b.txt"], ["c.txt"]


@each(
    ("trained_on", "asked", "validation_paths"),
    [(HASHED, CUT, []), (CUT, HASHED, []), (CUT, NAMED, CUT), (HASHED, NAMED, CUT)],
)
def test_a_file_that_the_training_split_in_another_way_is_refused(
    trained: RunFolder, here: Path, trained_on: list[str], asked: list[str], validation_paths: list[str]
) -> None:
    what, of_training = trained_on_files(trained, here, trained_on)
    data = config.Files(format="text", paths=tuple(asked), validation_paths=tuple(validation_paths))
    with pytest.raises(ConfigError, match=r"^split: .*step_00000010 was trained on a\.txt, .*, or use split=all$"):
        check_split(config.Perplexity(checkpoint="", data=data), what)
    check_split(config.Perplexity(checkpoint="", data=data, split="all"), what)
    elsewhere = config.Files(format="text", paths=("c.txt",))
    for own in (of_training, elsewhere):
        check_split(config.Perplexity(checkpoint="", data=own), what)


def trained_on_files(trained: RunFolder, here: Path, names: list[str]) -> tuple[Trained, config.Files]:
    """Return a copy of the run's description, as if it had been trained on these files, and the files."""
    for name in (*HASHED, *NAMED):
        (here / name).write_text(f"the text of {name}, which is long enough to be cut in two parts, each with a word")
    data = config.Files(format="text", paths=tuple(names))
    copy = RunFolder(Path(shutil.copytree(trained.path, here / "run", dirs_exist_ok=True)))
    (copy.path / "shards.json").write_text(json.dumps({"corpus": identity(data)}))
    return replace(describe(find(str(copy.path), Path("runs"))), data=data), data

"""A training on a blend that changes records it, resumes across the change, and works with ranks and micro-batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gang
import pytest
from composing import compose_job, validated

from mxstudy.config import fingerprint, read_run
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of
from mxstudy.studies.pretrain.run import used_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal

pytestmark = pytest.mark.integration

STEPS = 10
TINY = (
    *("+experiment=quickstart", "runs_dir=runs", "tracking=none", "precision=mxfp8", "norm=mxnorm_p2"),
    *("model.hidden_size=64", "model.ffn_size=128", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"),
    *("train.batch_size=4", "train.sequence_length=64", "train.deterministic=true", f"train.steps={STEPS}"),
    *("checkpoint.every_steps=4", "checkpoint.keep_last=3", "validation.sequences=8", "validation.every_steps=5"),
    *("tokenizer=bytes", "model.vocab_size=320", "data=blend"),
)
PHASES = "data.phases=[{weights: {prose: 3, digits: 1}}, {from_fraction: 0.6, weights: {digits: 1}}]"
MICRO = "train.micro_batch_size=1"


TEXTS = {"prose": "some words of prose, {} of them", "digits": "0 1 2 3 5 8 13 {} 21 34"}


def write(folder: Path) -> None:
    for name, text in TEXTS.items():
        rows = (json.dumps({"text": f"{text.format(n)} " * 20}) + "\n" for n in range(30))
        (folder / f"{name}.jsonl").write_text("".join(rows))


def words(folder: Path) -> tuple[str, ...]:
    """Return the command line's words for a blend of the two corpora in that folder."""
    own = "{{kind: files, format: jsonl, paths: ['{}/{}.jsonl'], validation_fraction: 0.2}}"
    corpora = (f"+data.corpora.{name}={own.format(folder, name)}" for name in TEXTS)
    return *TINY, PHASES, *corpora, f"cache_dir={folder}/cache"


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpora")
    write(folder)
    return words(folder)


def made(folder: Path, *overrides: str) -> Path:
    values: Any = compose_job(*overrides).values
    RunFolder.create(folder / "run", read_run(values), "f" * 64, {"label": "test"})
    return folder / "run"


def ran(folder: Path, run: Path, ranks: int = 1) -> Path:
    if ranks == 1:
        assert study_of("pretrain").run(RunFolder(run).config(), RunFolder(run), "test") == "finished"
    else:
        assert gang.together(folder / "processes", ranks, gang.train, run) == ["finished"] * ranks
    return run


def losses(run: Path) -> list[float]:
    return [
        row[key] for row in read_journal(run / "metrics.jsonl") for key in ("loss", "validation_loss") if key in row
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, blended: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return ran(folder, made(folder, *blended, MICRO))


@pytest.mark.slow
def test_the_journal_has_the_shards_and_what_was_taken_of_each_corpus(undisturbed: Path) -> None:
    rows = read_journal(undisturbed / "metrics.jsonl")
    manifests = json.loads((undisturbed / "shards.json").read_text())["corpora"]
    (data,) = (row["data"] for row in rows if "data" in row)
    assert data["phases"] == [
        {"from_step": 0, "samples": {"prose": 18, "digits": 6}},
        {"from_step": 6, "samples": {"digits": 16}},
    ]
    cache = Path(RunFolder(undisturbed).config().cache_dir) / "shards"
    for name in ("prose", "digits"):
        manifest = json.loads((cache / data["corpora"][name]["shards"] / "manifest.json").read_text())
        assert manifest == manifests[name]
        assert data["corpora"][name]["tokens"] == manifest["splits"]["train"]["tokens"]
    (taken,) = (row for row in rows if row.get("probe") == "corpora")
    assert taken["step"] == STEPS - 1
    assert (taken["values"]["prose/tokens"], taken["values"]["digits/tokens"]) == (18 * 64, 22 * 64)
    assert taken["values"]["digits/epochs"] == pytest.approx(22 / ((data["corpora"]["digits"]["tokens"] - 1) // 64))


def test_the_tokens_of_each_corpus_are_told_in_words() -> None:
    taken = {"prose/tokens": 3072.0, "prose/epochs": 1.25, "digits/tokens": 64.0, "digits/epochs": 0.004}
    assert used_of(taken) == "digits 64 (0.00 epochs), prose 3,072 (1.25 epochs)"


@pytest.mark.parametrize("step", [4, 8])
def test_a_run_goes_on_to_the_same_bits_before_and_after_the_blend_has_changed(
    step: int, tmp_path: Path, undisturbed: Path
) -> None:
    run = ran(tmp_path, gang.killed_after(undisturbed, step, tmp_path))
    assert losses(run) == losses(undisturbed)
    assert len([row for row in read_journal(run / "metrics.jsonl") if row.get("probe") == "corpora"]) == 1


@pytest.mark.slow
def test_two_ranks_take_the_same_samples(tmp_path: Path, blended: tuple[str, ...], undisturbed: Path) -> None:
    """Two ranks see the samples that one process sees.

    Sums over ranks have another order, so the last bits differ. A resumed run's do not.
    """
    two = ran(tmp_path, made(tmp_path, *blended, MICRO), ranks=2)
    assert losses(two) == pytest.approx(losses(undisturbed), abs=2e-3)
    assert losses(two)[0] == pytest.approx(losses(undisturbed)[0], rel=1e-6)
    again = ran(tmp_path / "again", gang.killed_after(two, 4, tmp_path / "again"), ranks=2)
    assert losses(again) == losses(two)


def test_micro_batches_are_slices_of_the_same_batch(
    tmp_path: Path, blended: tuple[str, ...], undisturbed: Path
) -> None:
    whole = ran(tmp_path, made(tmp_path, *blended))
    assert losses(whole) == pytest.approx(losses(undisturbed), abs=2e-3)


def test_a_run_is_not_resumed_on_other_shards_of_one_corpus(tmp_path: Path, undisturbed: Path) -> None:
    run = gang.killed_after(undisturbed, 4, tmp_path)
    manifests = json.loads((run / "shards.json").read_text())
    manifests["corpora"]["digits"]["files"]["train-00000.bin"]["sha256"] = "0" * 64
    (run / "shards.json").write_text(json.dumps(manifests))
    with pytest.raises(ConfigError, match=r"data: the shards in .* are not those that .* began with"):
        study_of("pretrain").run(RunFolder(run).config(), RunFolder(run), "test")


def test_each_corpus_and_each_weight_is_in_the_fingerprint(tmp_path: Path) -> None:
    def of(*overrides: str) -> str:
        config = validated(compose_job(*words(tmp_path), *overrides))
        return fingerprint(config, *study_of("pretrain").identity(config))

    write(tmp_path)
    first = of()
    assert of("data.phases.0.weights.prose=2") != first
    assert of("data.phases.1.from_fraction=0.7") != first
    (tmp_path / "digits.jsonl").rename(tmp_path / "moved.jsonl")
    shutil.copy(tmp_path / "moved.jsonl", tmp_path / "digits.jsonl")
    assert of() == first
    (tmp_path / "digits.jsonl").write_text(json.dumps({"text": "2 4 6"}) + "\n")
    assert of() != first

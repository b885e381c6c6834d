"""The quickstart's sweep, shortened, gives four arms and one comparison."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import run
from safetensors.torch import load_file

from mxstudy.reader import plain
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal

pytestmark = pytest.mark.slow

ARMS = ["bf16 rmsnorm", "mxfp8 rmsnorm", "mxfp8 mxnorm_p1", "mxfp8 mxnorm_p2"]
SHORT = (
    *("train.steps=8", "train.batch_size=2", "train.sequence_length=64", "validation.sequences=4"),
    *("model.num_layers=1", "model.hidden_size=128", "model.ffn_size=256", "model.num_heads=2", "model.num_kv_heads=1"),
)
COMMAND = ("+sweep=quickstart", "wait=true", *SHORT, "tokenizer=bytes")
PRECISION_NATS = 5e-3  # what quantising a fresh model's linears can do to its loss; batches differ by far more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path, cache: str) -> str:
    code, said = run(folder, *COMMAND, cache)
    assert code == 0, said
    return said


def by_arm(folder: Path) -> dict[str, RunFolder]:
    choices = {run: run.provenance()["choices"] for run in find_runs(folder / "runs")}
    return {f"{choice['precision']} {choice['norm']}": run for run, choice in choices.items()}


def curve(run: RunFolder) -> list[float]:
    return [row["loss"] for row in read_journal(run.journal_path) if "loss" in row]


def journals(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("runs/*/*/metrics.jsonl")}


def table_of(said: str) -> dict[str, list[str]]:
    """Return the cells of the table's rows by arm: validation loss, difference, tokens/s.

    Each arm must have one run, which did not diverge.
    """
    rows = re.findall(r"^ *((?:bf16|mxfp8) \w+) +1 +0 +(\S+) +(\S+) +([\d,]+)(?: +\S+)? *$", said, re.MULTILINE)
    return {arm: cells for arm, *cells in rows}


def test_the_table_has_four_arms_and_their_difference_to_the_baseline(said: str, folder: Path) -> None:
    table, runs = table_of(said), by_arm(folder)
    assert list(table) == ARMS
    losses = {arm: float(cells[0]) for arm, cells in table.items()}
    for arm, (loss, difference, tokens_per_s) in table.items():
        (measured,) = [r["validation_loss"] for r in read_journal(runs[arm].journal_path) if "validation_loss" in r]
        assert float(loss) == pytest.approx(measured, abs=6e-5)
        if arm != "mxfp8 rmsnorm":
            assert float(difference) == pytest.approx(losses[arm] - losses["mxfp8 rmsnorm"], abs=1.1e-4)
        assert float(tokens_per_s.replace(",", "")) > 0
    assert table["mxfp8 rmsnorm"][1] == "baseline"
    (entropy,) = re.findall(r"^unigram entropy of the validation split: (\S+) nats a token$", said, re.MULTILINE)
    assert 2 < float(entropy) < 4  # Python source text, in bytes


def test_the_figure_is_where_it_says(said: str, folder: Path) -> None:
    (path,) = re.findall(r"^loss curves: (.*)$", said, re.MULTILINE)
    assert Path(path) == folder.resolve() / "figures" / "quickstart.png"
    assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_all_arms_learn_from_the_same_batches(said: str, folder: Path) -> None:
    runs = by_arm(folder)
    assert sorted(runs) == sorted(ARMS)
    manifests = {(run.path / "shards.json").read_text() for run in runs.values()}
    assert len(manifests) == 1
    configs = [plain(run.config()) for run in runs.values()]
    assert {(config["seed"], config["data_seed"]) for config in configs} == {(0, 0)}
    curves = {arm: curve(run) for arm, run in runs.items()}
    assert all(losses[-1] < losses[0] - 0.5 for losses in curves.values())


def test_a_second_call_skips_all_and_shows_the_table_again(said: str, folder: Path, cache: str) -> None:
    before = journals(folder)
    code, again = run(folder, *COMMAND, cache)
    assert code == 0, again
    assert len(re.findall(r"^\[\d/4\] .*  skipped: finished", again, re.MULTILINE)) == 4
    assert table_of(again) == table_of(said)
    assert f"loss curves: {folder.resolve()}/figures/quickstart.png" in again
    assert journals(folder) == before


def test_all_arms_start_from_the_same_weights_and_see_the_same_batches(cache: str, tmp_path: Path) -> None:
    """With a learning rate that moves no weight, only the precision and the norm's estimate can distinguish arms."""
    still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "tracking=none", cache)
    code, said = run(tmp_path, *COMMAND, *still)
    assert code == 0, said
    runs = by_arm(tmp_path)
    tensors = {}
    for arm, folder_of_arm in runs.items():
        (file,) = (folder_of_arm.checkpoints / "step_00000008").glob("*.safetensors")
        tensors[arm] = {name: t for name, t in load_file(file).items() if name.startswith("model.")}
    curves = {arm: curve(run) for arm, run in runs.items()}
    for arm in ARMS[1:]:
        assert tensors[arm].keys() == tensors[ARMS[0]].keys()
        assert all(torch.equal(tensor, tensors[ARMS[0]][name]) for name, tensor in tensors[arm].items())
        assert curves[arm] != curves[ARMS[0]]
        assert curves[arm] == pytest.approx(curves[ARMS[0]], abs=PRECISION_NATS)
    spread = max(curves[ARMS[0]]) - min(curves[ARMS[0]])
    assert spread > 20 * PRECISION_NATS, json.dumps(curves)

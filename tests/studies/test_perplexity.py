"""Perplexity of a checkpoint, as a kind of run, has training's own loss in its tables, and survives a kill."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from commands import Fault, corpus, run, run_here
from composing import compose

from mxstudy import config, results
from mxstudy.config import read_run
from mxstudy.data.content_hash import digest_of
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.scorer import Request, Scored
from mxstudy.studies import trained_model as of_checkpoint
from mxstudy.studies.perplexity import check as checks
from mxstudy.studies.perplexity import run as perplexity
from mxstudy.studies.perplexity import tables as perplexity_tables
from mxstudy.studies.perplexity.check import Document, Windows
from mxstudy.studies.perplexity.study import STUDY
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.mlflow_store import connect

EXACT = ("norm=rmsnorm", "precision=fp32", "compute=fp32")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the override that names forty documents."""
    return corpus(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def asked(trained: RunFolder, texts: str) -> list[str]:
    where = ["+experiment=perplexity", f"checkpoint={trained.path}", "data=text", texts, "split=all"]
    return [*where, "window=32", "stride=32", "tracking=none"]


@pytest.fixture(scope="module")
def scored(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("scored")
    run_here(folder, *asked, *EXACT)
    (found,) = find_runs(folder / "runs")
    return found


def text_files(texts: str) -> list[Path]:
    pattern = Path(texts.partition("=")[2].strip("[]'"))
    return sorted(pattern.parent.glob(pattern.name))


def settings(*arguments: str) -> Any:
    (one,) = compose(*arguments)
    return read_run(one.values)


# ------------------------------------------------------------------------------------------------------- documents


def of_files(paths: list[Path], **changes: Any) -> config.Perplexity:
    data = config.Files(format="text", paths=tuple(map(str, paths)), validation_fraction=0.4)
    return config.Perplexity(checkpoint="", data=data, **changes)


def test_the_first_documents_of_a_split_each_once(tmp_path: Path) -> None:
    words = ["same" if number in (3, 5) else f"text {number}" for number in range(20)]
    paths = [tmp_path / f"{number:02}.txt" for number in range(20)]
    for path, text in zip(paths, words, strict=True):
        path.write_text(text)
    by_split = {
        split: list(checks.documents_of(of_files(paths, split=split))) for split in ("all", "train", "validation")
    }
    assert [document.text for document in by_split["all"]] == list(dict.fromkeys(words))
    assert sorted(d.text for split in ("train", "validation") for d in by_split[split]) == sorted(set(words))
    assert by_split["validation"]
    assert all(digest_of(document.text)[0] < 0.4 * 256 + 1 for document in by_split["validation"])
    assert [document.number for document in by_split["train"]] == list(range(len(by_split["train"])))
    assert list(checks.documents_of(of_files(paths, split="train", documents=3))) == by_split["train"][:3]


class Scores:
    """A scorer that gives every token the loss `nats`."""

    def __init__(self, nats: float) -> None:
        self.nats, self.asked = nats, 0

    def score(self, requests: list[Request]) -> list[Scored]:
        self.asked = max(self.asked, len(requests))
        return [Scored(-self.nats * len(request.continuation), False) for request in requests]


def test_documents_are_counted_in_bytes_characters_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 12)
    scorer = Scores(0.5)
    documents = [Document(0, 7, "h\u00e9 " * 5), Document(0, 8, "abc")]
    rows = perplexity.score(scorer, ByteTokenizer(), Windows(4, 2), documents)  # type: ignore[arg-type]
    assert rows.drop(columns="sha256").to_dict("list") == {
        "document": [7, 8],
        "bytes": [20, 3],
        "characters": [15, 3],
        "tokens": [20, 3],
        "nats": [10.0, 1.5],
    }
    assert scorer.asked == 3


@pytest.mark.parametrize("nats", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_an_error_that_names_the_document(nats: float) -> None:
    with pytest.raises(ValueError, match=r"document 7, 'abc'\.\.\.: its loss is (nan|inf) nats"):
        perplexity.score(Scores(nats), ByteTokenizer(), Windows(4, 2), [Document(0, 7, "abc")])  # type: ignore[arg-type]


def test_totals_by_hand() -> None:
    ln2 = math.log(2)
    rows = {"nats": [8 * ln2, 4 * ln2], "bytes": [4, 4], "characters": [4, 2], "tokens": [2, 1]}
    totals = perplexity.totals_of(pd.DataFrame(rows))
    assert totals == pytest.approx(
        {
            "nats_per_token": 4 * ln2,
            "perplexity": 16.0,
            "bits_per_byte": 1.5,
            "bits_per_byte_stderr": 0.5,  # residuals 2 and -2: sqrt(2 / 1 * 8) / 8
            "bits_per_character": 2.0,
            "tokens": 3,
            "bytes": 8,
            "characters": 6,
            "documents": 2,
        }
    )
    one = perplexity.totals_of(pd.DataFrame(rows).iloc[:1])
    assert math.isnan(one["bits_per_byte_stderr"])
    assert one["bits_per_byte"] == pytest.approx(2.0)


# ------------------------------------------------------------------------------------------------------ end to end


@pytest.mark.integration
def test_the_loss_is_what_training_calls_it(scored: RunFolder, asked: list[str], texts: str) -> None:
    """The loss is training's own: its loss function on its model.

    Windows have T + 1 tokens at stride T over EOS and the text.
    """
    path, what = of_checkpoint.described(settings(*asked, *EXACT))
    model = checkpoints.load(path, what, torch.device("cpu"))
    rows = results.load([scored.path], "documents").set_index("document")
    files = text_files(texts)
    assert len(rows) == len(files) == 40
    for number, file in list(enumerate(files))[::8]:
        whole = torch.tensor([[256, *file.read_bytes()]])
        loss_nats = 0.0
        for start in range(0, whole.shape[1] - 1, 32):
            tokens_BT = whole[:, start : start + 33]
            with torch.no_grad():
                loss_nats += model(tokens_BT[:, :-1], tokens_BT[:, 1:]).item()
        assert rows.loc[number, "nats"] == pytest.approx(loss_nats, rel=1e-5)
        assert rows.loc[number, "bytes"] == rows.loc[number, "tokens"] == file.stat().st_size


@pytest.mark.integration
def test_what_a_run_leaves(scored: RunFolder, trained: RunFolder) -> None:
    documents, table = (results.load_table([scored], name) for name in ("documents", "perplexity"))
    (row,) = table.to_dict("records")
    assert row["nats_per_token"] == pytest.approx(documents["nats"].sum() / documents["tokens"].sum())
    assert (row["checkpoint"], row["window"], row["stride"]) == (
        f"{trained.status().fingerprint[:12]}/step_00000010",
        32,
        32,
    )
    assert sorted(path.name for path in (scored.path / "tables").iterdir()) == [
        "documents.parquet",
        "perplexity.parquet",
    ]
    said = json.loads((scored.path / "perplexity.json").read_text())
    assert said == {name: row[name] for name in said}
    plan, journal = read_journal(scored.journal_path)
    assert (plan["step"], set(plan["precision"].values())) == (10, {"fp32"})
    assert plan["backends"] == dict.fromkeys(plan["backends"], "reference") != {}
    assert (journal["step"], journal["probe"]) == (10, "perplexity")
    assert journal["values"]["bits_per_byte"] == row["bits_per_byte"]
    assert scored.path / "perplexity.json" in scored.artifacts()
    status = scored.status()
    assert (status.state, status.step, status.steps) == ("finished", 40, 40)


@pytest.mark.integration
def test_more_context_is_another_run_with_another_loss(
    scored: RunFolder, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [word for word in asked if not word.startswith(("window=", "stride="))]
    run_here(tmp_path, *own, *EXACT, "documents=5")
    (more,) = find_runs(tmp_path / "runs")
    assert results.load_table([more], "perplexity")[["window", "stride"]].values.tolist() == [[64, 32]]
    ours, theirs = (results.load([one.path], "documents") for one in (more, scored))
    assert ours["document"].tolist() == list(range(5))
    assert ours["sha256"].tolist() == theirs["sha256"].tolist()[:5]
    assert (ours["nats"] != theirs["nats"][:5]).all()
    run_here(tmp_path, *own, *EXACT, "documents=5")
    assert "skipped: finished" in capsys.readouterr().out


@dataclass(frozen=True)
class SmallChunks(Fault):
    """Keeps documents a few at a time."""

    def install(self) -> None:
        checks.CHUNK_CHARACTERS = 2000  # in a process of its own
        super().install()


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_next_chunk(asked: list[str], scored: RunFolder, tmp_path: Path) -> None:
    code, said = run(tmp_path, *asked, *EXACT, fault=SmallChunks(r"os.rename .*documents_00002", signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    (begun,) = find_runs(tmp_path / "runs")
    parts = sorted((begun.path / "tables").glob("documents*.parquet"))
    assert [part.name for part in parts] == ["documents_00000.parquet", "documents_00001.parquet"]
    for part in parts:  # to show that they are read, not made again
        table, provenance = results.read_table(part)
        results.write_table(table.assign(nats=table["nats"] + 1000.0), part, provenance)
    code, said = run(tmp_path, *asked, *EXACT, fault=SmallChunks("nothing"))
    assert code == 0, said
    assert "goes on" in said
    assert not list((begun.path / "tables").glob("documents_*"))
    ours, theirs = (results.load([one.path], "documents").drop(columns="label") for one in (begun, scored))
    kept = ours["nats"] > theirs["nats"] + 500
    assert 0 < kept.sum() < 40
    assert kept.iloc[: kept.sum()].all()
    pd.testing.assert_frame_equal(ours.assign(nats=ours["nats"] - 1000.0 * kept), theirs, rtol=1e-5)


@pytest.mark.integration
def test_checkpoints_are_compared_document_by_document(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path, *asked, "precision=as_trained,mxfp4")
    said = capsys.readouterr().out
    assert "bits/byte, minus mxnorm p=2, mxfp8, compute bf16" in said
    first, second = find_runs(tmp_path / "runs")
    totals = [results.load([one.path], "perplexity")["bits_per_byte"][0] for one in (first, second)]
    summed_up = perplexity_tables.summarise({"a": first, "b": second}, {})
    assert re.fullmatch(rf"bits/byte: .* {totals[0]:.4f}, .* {totals[1]:.4f}", summed_up.result)
    summary = summed_up.markdown
    rows = [
        [cell.strip() for cell in line.split("|")[2:5]] for line in summary.splitlines() if "compute bf16 |" in line
    ]
    assert rows[0] == [f"{totals[0]:.4f}", "-", "40"]
    value, low, high = (float(word.strip("[,]")) for word in rows[1][1].split())
    assert value == pytest.approx(totals[1] - totals[0], abs=6e-5)
    assert low < value < high
    assert len(rows) == 4
    other = RunFolder(Path(shutil.copytree(second.path, tmp_path / "other")))
    table = results.table_path(other, "perplexity")
    results.write_table(results.read_table(table)[0].assign(tokenizer="another"), table, {})
    by_byte, by_token = (perplexity_tables.compared(other, first, unit) for unit in perplexity_tables.UNITS)
    assert by_byte[1] == rows[1][1]
    assert by_token[1] == "-"


def test_a_difference_is_one_of_sums_over_documents() -> None:
    both = pd.DataFrame({"nats": [3.0, 10.0], "nats_theirs": [1.0, 14.0], "bytes": [1, 9], "tokens": [1, 3]})
    by_byte, by_token = perplexity_tables.UNITS
    found = perplexity_tables.difference(both, by_token)
    assert found[:3] == pytest.approx((-2 / 4, -4 / 3, 2.0))  # both draws often take one and the same document
    assert perplexity_tables.difference(both, by_byte).value == pytest.approx(-2 / 10 / math.log(2))
    same = both.assign(nats_theirs=both["nats"])
    assert perplexity_tables.difference(same, by_byte)[:3] == (0.0, 0.0, 0.0)


def test_a_single_document_has_no_interval() -> None:
    one = pd.DataFrame({"nats": [3.0], "nats_theirs": [1.0], "bytes": [4], "tokens": [4]})
    by_token = perplexity_tables.UNITS[1]
    assert perplexity_tables.difference(one, by_token).shown() == "+0.5000"


@pytest.mark.slow
def test_the_training_run_has_the_loss_in_mlflow(
    asked: list[str], uri: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(tmp_path, "+experiment=quickstart", "+debug=tiny", "runs_dir=runs", f"tracking.uri={uri}", cache)
    (training,) = find_runs(tmp_path / "runs")
    kept = [word for word in asked if not word.startswith(("checkpoint=", "tracking="))]
    run_here(tmp_path, *kept, f"checkpoint={training.status().mlflow_run_id}", "documents=5", f"tracking.uri={uri}")
    (own,) = [one for one in find_runs(tmp_path / "runs") if one.path != training.path]
    bits = results.load([own.path], "perplexity")["bits_per_byte"][0]
    client = connect(uri)
    monkeypatch.chdir(tmp_path)  # checkpoints are named from there on
    digest = of_checkpoint.digest_of_questions(own)
    for one, probe in ((training, f"perplexity_{digest}"), (own, "perplexity")):
        assert client.get_run(one.status().mlflow_run_id).data.metrics[f"{probe}/bits_per_byte"] == bits
    files = {file.path for file in client.list_artifacts(own.status().mlflow_run_id)}
    assert "perplexity.json" in files


def test_a_key_has_all_that_an_identity_depends_on(trained: RunFolder, tmp_path: Path) -> None:
    """One file is cut in two for its validation split, and whole in a sweep's next job, with split=all."""
    (tmp_path / "a.txt").write_text("the text of a file")
    given = {"checkpoint": str(trained.path), "data": config.Files(format="text", paths=(str(tmp_path / "a.txt"),))}
    cut, whole, train = (config.Perplexity(**given, split=split) for split in ("validation", "all", "train"))
    assert STUDY.identity(cut) != STUDY.identity(whole)
    assert STUDY.identity_key(cut) == STUDY.identity_key(train) != STUDY.identity_key(whole)


@pytest.mark.slow
def test_another_corpus_or_checkpoint_is_another_run(asked: list[str], trained: RunFolder, tmp_path: Path) -> None:
    first = STUDY.identity(settings(*asked))
    earlier = settings(
        *[word for word in asked if "checkpoint" not in word],
        "checkpoint=" + str(trained.checkpoints / "step_00000005"),
    )
    (tmp_path / "a.txt").write_text("another text")
    other = settings(*[word for word in asked if "data.paths" not in word], f"data.paths=[{tmp_path}/a.txt]")
    assert first[0] == "cpu"
    assert len({json.dumps(STUDY.identity(one)) for one in (settings(*asked), earlier, other)}) == 3

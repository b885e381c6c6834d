"""What a reviewer's browser is given: plain HTTP against a real server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tracked import make_folder, training_row, write_rows

from benchmarks.mlflow_server import Server
from mxstudy import results
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_mirror import mirror_of
from mxstudy.tracking.mlflow_parent import Summary, Sweep
from mxstudy.tracking.mlflow_store import create_store

pytestmark = pytest.mark.integration

PNG = b"\x89PNG of three curves"


def row_of(name: str, step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "probe": name, "values": values}


def journal(diverges: bool) -> list[dict[str, Any]]:
    """Three steps with probes, a spike at the second, and in the end a validation or a NaN."""
    rows = [training_row(step) for step in range(3)] + [{"step": 1, "spike": {"loss": 4.9, "mean": 4.0, "std": 0.1}}]
    rows += [row_of("norm_output_rms", 1, **{"layers.0.attention_norm/rms": 0.99})]
    rows += [row_of("saturation", 1, **{"layers.0.wo/forward_x/overflow_fraction": 0.125})]
    rows += [row_of("memory", 1, rss_gib=0.5)]
    last = training_row(3, math.nan) if diverges else {"step": 2, "validation_loss": 4.25}
    return [*sorted(rows, key=lambda row: row["step"]), last]


def arm(server: Server, runs: Path, digit: str, norm: str, diverges: bool) -> RunFolder:
    folder = make_folder(runs, digit * 64, label=f"norm={norm}", tracking={"uri": server.uri})
    write_rows(folder, journal(diverges))
    return folder


def tags_of(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


@pytest.mark.slow
def test_the_server_serves_a_sweep(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    assert create_store(server.uri) is None
    arms = {"a": ("rmsnorm", False), "b": ("mxnorm_p1", False), "c": ("mxnorm_p2", True)}
    folders = {digit * 64: arm(server, tmp_path / "runs", digit, *kind) for digit, kind in arms.items()}
    names = {digit * 64: norm for digit, (norm, _) in arms.items()}
    sweep = Sweep(server.uri, "quick", "quick: norm", {"experiment": "quick", "study": "pretrain"}, folders, names)
    parent_id = sweep.begin()
    for folder, (norm, diverges) in zip(folders.values(), arms.values(), strict=True):
        folder.update(mlflow_parent_id=parent_id)
        mirror = mirror_of(folder.config(), folder, f"norm={norm}")
        mirror.start()
        state, reason = ("diverged", "loss nan at step 3") if diverges else ("finished", None)
        folder.update(state=state, reason=reason)
        assert mirror.finish(state, reason) is None
    figure = tmp_path / "losses.png"
    figure.write_bytes(PNG)
    sweep.end(
        "finished", Summary("| arm | val loss |\n|---|---|\n| rmsnorm | 4.25 |", [figure], "val loss: rmsnorm 4.25")
    )

    def search(query: str) -> dict[str, dict[str, Any]]:
        runs = server.post("runs/search", experiment_ids=["1"], filter=query)["runs"]
        return {run["info"]["run_name"]: run for run in runs}

    children = search(f"tags.mlflow.parentRunId = '{parent_id}'")
    assert set(children) == {"norm=rmsnorm", "norm=mxnorm_p1", "norm=mxnorm_p2"}
    assert set(search("tags.norm = 'mxnorm_p1' and tags.seed = '0'")) == {"norm=mxnorm_p1"}
    assert set(search("tags.status = 'diverged'")) == {"norm=mxnorm_p2"}
    assert set(search("metrics.`val/loss` < 5")) == {"norm=rmsnorm", "norm=mxnorm_p1"}
    assert children["norm=mxnorm_p2"]["info"]["status"] == "FINISHED"
    assert tags_of(children["norm=mxnorm_p2"])["reason"] == "loss nan at step 3"
    wanted = {"experiment": "quick", "study": "pretrain", "seed": "0", "data_seed": "0", "status": "finished"}
    assert wanted.items() <= tags_of(children["norm=rmsnorm"]).items()

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    here, there = (results.load(paths, "runs") for paths in ([tmp_path / "runs" / "quick"], ["mlflow:quick"]))
    pd.testing.assert_frame_equal(here.drop(columns="folder"), there.drop(columns="folder"))
    for kind in ("metrics", "norm_output_rms", "spikes"):
        pd.testing.assert_frame_equal(*(results.load([p], kind) for p in (tmp_path / "runs" / "quick", "mlflow:quick")))
    with pytest.raises(ConfigError, match=r"mlflow:quack: .* has no such experiment or sweep; it has Default, quick"):
        results.load(["mlflow:quack"], "runs")

    metrics = {metric["key"]: metric["value"] for metric in children["norm=rmsnorm"]["data"]["metrics"]}
    assert {name.split("/")[0] for name in metrics} == {"train", "val", "norm_rms", "saturation", "system"}
    assert metrics["norm_rms/rms.layers.0.attention_norm"] == 0.99
    assert metrics["saturation/overflow_fraction_max.forward_x"] == 0.125
    assert (metrics["train/spikes"], metrics["train/tokens"], metrics["val/loss"]) == (1, 96, 4.25)
    run_id = children["norm=rmsnorm"]["info"]["run_id"]
    history = json.loads(server.get(f"api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=train/loss"))
    assert [(point["step"], point["value"]) for point in history["metrics"]] == [(0, 5.0), (1, 4.9), (2, 4.8)]

    (parent,) = search("tags.sweep_fingerprint != ''").values()
    assert parent["info"]["run_name"].startswith("quick: norm (")
    assert parent["info"]["run_id"] == parent_id
    assert "| rmsnorm | 4.25 |" in tags_of(parent)["mlflow.note.content"]
    assert tags_of(parent)["result"] == "val loss: rmsnorm 4.25"
    assert server.get(f"get-artifact?path=losses.png&run_uuid={parent_id}") == PNG
    assert b"| rmsnorm | 4.25 |" in server.get(f"get-artifact?path=summary.md&run_uuid={parent_id}")
    assert b"seed: 0" in server.get(f"get-artifact?path=config.yaml&run_uuid={run_id}")

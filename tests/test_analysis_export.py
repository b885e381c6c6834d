"""Export thins curves and large measurements by its rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import export
from mxstudy import results

STEPS = np.arange(101)


def curve(**columns: object) -> pd.DataFrame:
    return pd.DataFrame({"fingerprint": "a" * 64, "step": STEPS, "loss": 1 / (1.0 + STEPS), "time_s": 0.5} | columns)


def test_a_curve_keeps_some_steps_and_the_last_in_single_precision() -> None:
    both = pd.concat([curve(replica=0), curve(replica=1)[:96]], ignore_index=True)
    kept = export.thinned(both, "metrics", 20)
    assert kept.groupby("replica")["step"].agg(list).tolist() == [[0, 20, 40, 60, 80, 100], [0, 20, 40, 60, 80, 95]]
    assert kept.dtypes["loss"] == np.float32
    assert list(kept) == ["fingerprint", "step", "loss", "replica"]
    pd.testing.assert_frame_equal(export.thinned(kept, "metrics", 20), kept)  # a second time changes nothing


def test_gradient_norms_of_a_curve_keep_12_bits() -> None:
    norms = np.array([0.0, 1.0, 1 + 2.0**-11, 1 + 2.0**-12 + 2.0**-20, -3.1415926, 1e-30, 7e37, np.inf, np.nan])
    kept = export.thinned(pd.DataFrame({"fingerprint": "a", "step": range(9), "grad_norm": norms}), "metrics", 1)
    found = kept["grad_norm"].to_numpy()
    exact = [0.0, 1.0, 1 + 2.0**-11, 1 + 2.0**-11]
    np.testing.assert_array_equal(found[:4], exact)
    np.testing.assert_allclose(found, norms, rtol=2.0**-12)
    assert len(np.unique(np.frexp(found[4:7])[0] * 2**12 % 1)) == 1  # all bits below the twelfth are 0
    pd.testing.assert_frame_equal(export.thinned(kept, "metrics", 1), kept)


def test_noise_and_fractions_of_operands_keep_12_bits() -> None:
    names = [
        f"layers.{layer}.attention.wo/forward_x/{what}" for layer in (0, 1) for what in ("sqnr_db", "overflow_fraction")
    ]
    table = pd.DataFrame({"fingerprint": ["a"], "step": [200]} | {name: [np.pi] for name in names})
    kept = export.thinned(table, "saturation", 1)
    assert kept[names].to_numpy().tolist() == [[round(np.pi * 2**10) / 2**10] * 4]
    assert list(kept["step"]) == [200]
    words = table.assign(**{"layers.0/count": 123457, "layers.0/format": "E4M3"})
    assert export.thinned(words, "saturation", 1)[["layers.0/count", "layers.0/format"]].to_numpy().tolist() == [
        [123457, "E4M3"]
    ]
    whole = export.thinned(table, "gradient_bias", 1)
    bounds = table.assign(**{"hessian/eigenvalue": np.pi, "hessian/stability": 1 - 2**-20})
    kept = export.thinned(bounds, "sharpness", 1)[["hessian/eigenvalue", "hessian/stability"]]
    assert kept.to_numpy().tolist() == [[round(np.pi * 2**10) / 2**10, 1 - 2**-20]]
    assert list(whole) == ["fingerprint", "step"]


def test_curves_of_forks_are_thinned_from_their_first_step() -> None:
    forks = [pd.DataFrame({"fingerprint": "a", "fork": n, "step": range(at, at + 41)}) for n, at in ((0, 7), (1, 15))]
    kept = export.thinned(pd.concat(forks), "fork_metrics", 20)
    assert kept.groupby("fork")["step"].apply(list).tolist() == [[7, 27, 47], [15, 35, 55]]


def test_events_outcomes_and_final_values_are_whole() -> None:
    for kind in ("runs", "validation", "forks", "scores"):
        table = curve()
        pd.testing.assert_frame_equal(export.thinned(table, kind, 20), table)


def test_of_a_run_that_lists_precisions_their_fields_are_left_out() -> None:
    table = curve(**{"config.precisions.nvfp4.block_size": 16, "config.precision.block_size": 32})
    assert list(export.thinned(table, "runs", 1))[-1] == "config.precision.block_size"


def test_of_a_large_measurement_what_is_read_is_kept() -> None:
    names = [
        "layers.0/ratio",
        "model/ratio",
        "x/floor/overflow_fraction",
        "x/rceil/overflow_fraction",
        "x/mean",
        "x/std",
    ]
    table = curve(**dict.fromkeys(names, 0.5))
    assert "layers.0/ratio" not in export.thinned(table, "gradient_bias", 1)
    by_layer = curve(**{"layers.0/cosine": 0.5, "layers.0.wo/forward_x/sqnr_db": 20.0, "x/sqnr_db_gaussian": 21.0})
    assert list(export.thinned(by_layer, "gradient_bias", 1))[-2] == "layers.0/cosine"
    operands = curve(**dict.fromkeys(["layers.0.w/ratio", "layers.0.w/forward_x/ratio", "model/wgrad_x/cosine"], 0.5))
    kept = ["layers.0.w/forward_x/ratio", "model/wgrad_x/cosine"]
    assert list(export.thinned(operands, "gradient_bias", 1))[-2:] == kept
    assert list(export.thinned(by_layer, "saturation", 1))[-2:] == ["layers.0/cosine", "layers.0.wo/forward_x/sqnr_db"]
    assert list(export.thinned(table, "last_bin", 20))[-3:] == ["model/ratio", "x/floor/overflow_fraction", "x/mean"]
    assert len(export.thinned(table, "last_bin", 20)) == len(table)
    assert export.thinned(table, "activation_histograms", 1)["step"].tolist() == [100]


def test_tables_are_exported_again_and_a_longer_prefix_keeps_its_own(tmp_path: Path, monkeypatch) -> None:
    about = {"commit": "c0ffee"}
    for name in ("lot", "lot_2"):
        results.write_table(pd.DataFrame({"fingerprint": [name]}), tmp_path / f"{name}_runs.parquet", about)
        results.write_table(curve(label=name), tmp_path / f"{name}_metrics.parquet", about)
    export.main(["--runs", str(tmp_path / "lot"), "--name", "lot", "--to", str(tmp_path / "to"), "--every-steps", "50"])
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["lot_metrics.parquet", "lot_runs.parquet"]
    metrics, provenance = results.read_table(tmp_path / "to" / "lot_metrics.parquet")
    assert (metrics["step"].tolist(), metrics["label"].unique().tolist()) == ([0, 50, 100], ["lot"])
    assert provenance == about
    with pytest.raises(SystemExit):
        export.main(["--runs", str(tmp_path / "none"), "--name", "x"])


def test_columns_of_measurements_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, columns = str(tmp_path / "lot"), {"layers.0.w/forward_x/ratio": 0.5, "model/ratio": 0.1}
    results.write_table(pd.DataFrame({"fingerprint": ["lot"], "layers.0.w/x": 1.0}), tmp_path / "lot_runs.parquet", {})
    results.write_table(curve(**columns), tmp_path / "lot_gradient_bias.parquet", {})
    given = ["--runs", prefix, "--name", "less", "--to", str(tmp_path)]
    export.main([*given, "--without", r"^layers\."])
    less, _ = results.read_table(tmp_path / "less_gradient_bias.parquet")
    assert "layers.0.w/forward_x/ratio" not in less
    assert less["model/ratio"].tolist() == pytest.approx([0.1] * len(less), rel=2**-12)
    assert "layers.0.w/x" in results.read_table(tmp_path / "less_runs.parquet")[0]  # tables of runs stay whole
    with pytest.raises(SystemExit):
        export.main([*given, "--without", "layers("])
    assert "--without: layers( is not a regular expression" in capsys.readouterr().err


def test_runs_that_came_later_join_the_tables(tmp_path: Path) -> None:
    for name in ("lot", "later"):
        results.write_table(pd.DataFrame({"fingerprint": [name]}), tmp_path / f"{name}_runs.parquet", {"commit": name})
        results.write_table(curve(fingerprint=name), tmp_path / f"{name}_metrics.parquet", {"commit": name})
    lot, later = str(tmp_path / "lot"), str(tmp_path / "later")
    export.main(["--runs", lot, later, "--name", "lot", "--to", str(tmp_path), "--every-steps", "50"])
    metrics, provenance = results.read_table(tmp_path / "lot_metrics.parquet")
    assert metrics.groupby("fingerprint", sort=False)["step"].agg(list).to_dict() == {
        "lot": [0, 50, 100],
        "later": [0, 50, 100],
    }
    assert provenance == {"commit": "lot"}


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lot", "again"):
        results.write_table(pd.DataFrame({"fingerprint": ["c0ffee"]}), tmp_path / f"{name}_runs.parquet", {})
    with pytest.raises(SystemExit):
        export.main(["--runs", str(tmp_path / "lot"), str(tmp_path / "again"), "--name", "lot", "--to", str(tmp_path)])
    assert "1 runs are given twice, such as c0ffee" in capsys.readouterr().err


def test_of_a_folder_the_experiment_and_the_name_stay() -> None:
    table = pd.DataFrame({"fingerprint": ["a"], "folder": ["/home/me/runs/quickstart/aaaa"]})
    assert list(export.thinned(table, "runs", 1)["folder"]) == ["quickstart/aaaa"]

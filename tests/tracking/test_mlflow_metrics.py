"""A journal's numbers have their places in MLflow."""

from __future__ import annotations

import math

from each import each

from mxstudy.tracking.mlflow_metrics import metrics_of


def probe(name: str, **values: object) -> dict[str, float]:
    row = {"step": 3, "time_s": 9.0, "probe": name, "values": {k.replace("__", "/"): v for k, v in values.items()}}
    return dict(metrics_of(row))


def test_a_step_is_in_train_and_its_speed_in_system() -> None:
    row = {"step": 3, "time_s": 9.0, "tokens": 128, "loss": 5.5, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 100.0}
    assert dict(metrics_of(row | {"memory_gib": 2.0, "mfu": 0.5})) == {
        "train/tokens": 128.0,
        "train/loss": 5.5,
        "train/lr": 1e-3,
        "train/grad_norm": 1.0,
        "system/tokens_per_s": 100.0,
        "system/memory_gib": 2.0,
        "system/mfu": 0.5,
    }


@each(
    ("row", "metrics"),
    [
        ({"step": 3, "validation_loss": 4.5}, {"val/loss": 4.5}),
        ({"step": 0, "precision": [["layers.0", "x"]], "parameters": 7}, {"system/parameters": 7.0}),
        ({"step": 3, "spike": {"loss": 9.0, "ring": "f"}}, {"train/spikes": 2.0, "train/spike_loss": 9.0}),
    ],
)
def test_other_rows(row: dict, metrics: dict) -> None:
    assert dict(metrics_of(row, spikes=2)) == metrics


@each(
    ("name", "metric"),
    [
        ("norm_output_rms", "norm_rms/rms.layers.0.norm"),
        ("memory", "system/rms.layers.0.norm"),
        ("timing", "system/rms.layers.0.norm"),
        ("corpora", "system/rms.layers.0.norm"),
        ("one_of_tomorrow", "one_of_tomorrow/rms.layers.0.norm"),
    ],
)
def test_a_probe_has_a_folder_and_names_one_slash(name: str, metric: str) -> None:
    assert probe(name, **{"layers.0.norm__rms": 0.5, "layers.0.norm__counts": [1, 2]}) == {metric: 0.5}


def test_histograms_and_their_constant_bounds_stay_in_the_journal() -> None:
    assert probe("activation_histograms", norm__input=[1, 2], norm__bound=5.6) == {}


def test_saturation_is_told_by_operand_over_all_linears_and_without_its_constants() -> None:
    values = {
        f"{linear}__forward_x__{quantity}": value
        for linear, value in {"layers.0.wo": 0.25, "layers.1.wo": 0.75, "layers.1.w2": math.nan}.items()
        for quantity in ("overflow_fraction", "overflow_fraction_gaussian", "sqnr_db", "scale_exponent_min")
    }
    assert probe("saturation", **values) == {
        "saturation/overflow_fraction_mean.forward_x": 0.5,
        "saturation/overflow_fraction_max.forward_x": 0.75,
        "saturation/sqnr_db_mean.forward_x": 0.5,
        "saturation/sqnr_db_min.forward_x": 0.25,
        "saturation/scale_exponent_min.forward_x": 0.25,
    }


def test_routing_is_told_over_layers() -> None:
    values = {f"layers.{i}.ffn__{name}": i + 1.0 for i in (0, 1) for name in ("busiest", "entropy")}
    assert probe("routing", **values, **{"layers.0.ffn__loads": [0.5, 0.5]}) == {
        "routing/busiest_max.layers.ffn": 2.0,
        "routing/entropy_mean.layers.ffn": 1.5,
        "routing/entropy_min.layers.ffn": 1.0,
    }


def test_weights_and_outliers_are_told_over_layers() -> None:
    gain = {"layers.0.norm.weight__min": 0.5, "layers.11.norm.weight__min": 0.25, "norm.weight__min": 0.75}
    assert probe("weights", **gain) == {"weights/min.layers.norm.weight": 0.25, "weights/min.norm.weight": 0.75}
    largest = {"layers.0.norm__absmax": 2.0, "layers.1.norm__absmax": 4.0, "layers.1.norm__feature": 17}
    assert probe("outlier_features", **largest) == {
        "outlier_features/absmax_mean.layers.norm": 3.0,
        "outlier_features/absmax.layers.norm": 4.0,
    }


def test_last_bins_of_gains_are_told_over_layers_and_without_their_constants() -> None:
    gains = {"layers.0.wqkv.norm.weight": 0.25, "layers.1.wqkv.norm.weight": 0.75, "norm.weight": 0.5}
    values = {f"{gain}__floor__max_fraction": value for gain, value in gains.items()}
    assert probe("last_bin", **values, **{"gaussian.E4M3__floor__max_fraction": 0.1}) == {
        "last_bin/max_fraction_mean.layers.wqkv.norm.weight.floor": 0.5,
        "last_bin/max_fraction_max.layers.wqkv.norm.weight.floor": 0.75,
        "last_bin/max_fraction_mean.norm.weight.floor": 0.5,
        "last_bin/max_fraction_max.norm.weight.floor": 0.5,
    }


def test_last_bins_of_a_student_s_replicas_stay_in_the_journal() -> None:
    assert probe("last_bin", **{"layers.0.up.norm.weight__floor__max_fraction": [0.25, 0.5]}) == {}


def test_gradient_bias_is_told_of_the_whole_model_and_by_operand() -> None:
    by_operand = {"model__wgrad_x__ratio": 0.5, "layers.0.w__wgrad_x__ratio": 0.75}
    assert probe("gradient_bias", **by_operand) == {"gradient_bias/ratio.wgrad_x": 0.5}
    assert probe("gradient_bias", model__ratio=0.5, **{"layers.0.w__ratio": 0.75}) == {"gradient_bias/ratio": 0.5}

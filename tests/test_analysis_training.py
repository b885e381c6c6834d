"""Figures and tables of training runs show what frames made by hand say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from arm_configs import pretrain
from test_analysis import drawn

from analysis import loss_comparison, loss_curves, models_table, style
from analysis.instability import fig03_language, loss_and_gradient_norm, table04_mitigations
from analysis.instability.scaling_runs import from_runs
from analysis.mxnorm import fig03_lr_sensitivity, fig05_outlier_feature
from mxstudy.results import with_arms, write_table

pytestmark = pytest.mark.usefixtures("figure_rules")
STEPS = 50


def curve(label: str, offset: float, **columns: object) -> pd.DataFrame:
    """Return a run's metrics, whose loss falls from 5 + `offset`."""
    step = np.arange(STEPS)
    rows = {"label": label, "fingerprint": label, "step": step, "tokens": 32 * (step + 1)}
    return pd.DataFrame(rows | {"loss": 5 - 0.05 * step + offset, "grad_norm": 2.0 + offset} | columns)


def of_rates() -> pd.DataFrame:
    """Return two models x two norms x two rates x two seeds. At the high rate the second seed of mxnorm_p1 diverges."""
    rows = []
    for model, norm, rate, seed in (
        (m, n, r, s)
        for m in ("llama_125m", "llama_1b")
        for n in ("rmsnorm", "mxnorm_p1")
        for r in (-9, -7)
        for s in (0, 1)
    ):
        lost = norm == "mxnorm_p1" and rate == -7 and seed == 1
        loss = np.nan if lost else 3 + 0.5 * (rate == -7) + 0.1 * seed
        config = pretrain(
            norm, seed=seed, optimizer__lr=2.0**rate, model__num_layers=8 if model == "llama_125m" else 16
        )
        about = {"fingerprint": str(config), "state": "diverged" if lost else "finished", "validation_loss": loss}
        choices = {"choice.model": model, "choice.norm": norm}
        rows.append(about | choices | {f"config.{key}": value for key, value in config.items()})
    return pd.DataFrame(rows)


def test_losses_by_rate_are_means_with_the_range_of_the_seeds_below() -> None:
    figure = fig03_lr_sensitivity.draw(of_rates())
    tops, bottoms = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in tops] == ["llama_125m, 2 seeds", "llama_1b, 2 seeds"]
    assert figure.get_figwidth() == style.TWO_COLUMNS
    for top, bottom in zip(tops, bottoms, strict=True):
        rms, mx, cross = top.lines
        assert np.allclose(rms.get_xydata(), [(2**-9, 3.05), (2**-7, 3.55)])
        assert np.allclose(mx.get_xydata(), [(2**-9, 3.05), (2**-7, 3.5)])
        assert list(cross.get_xdata()) == [2**-7]
        assert np.allclose(bottom.lines[0].get_ydata(), [0.1, 0.1])
        assert bottom.get_xscale() == "log"


def test_the_first_seed_of_a_sweep_can_be_drawn() -> None:
    """The panel of ranges, then empty, once failed because it was drawn by logarithm."""
    runs = of_rates()
    fig03_lr_sensitivity.draw(runs[runs["config.seed"] == 0]).canvas.draw()


def test_the_loss_at_the_best_rate_stands_beside_the_paper_s() -> None:
    lines = fig03_lr_sensitivity.best(of_rates()).splitlines()
    assert lines[2] == "| llama_125m | rmsnorm | 2^-9 | 3.0500 ± 0.6353 (2) | 3.090 ± 0.004 |"
    assert lines[5] == "| llama_1b | mxnorm_p1 | 2^-9 | 3.0500 ± 0.6353 (2) | 2.684 ± 0.009 |"


def compared() -> pd.DataFrame:
    """Return two seeds per arm, which differ by 0.1 in one arm and by 0.3 in the other."""
    offsets = {("bf16", 0): 0.0, ("bf16", 1): 1.0, ("mxfp8", 0): 0.1, ("mxfp8", 1): 1.3}
    return pd.concat([curve(f"{arm} {seed}", o) for (arm, seed), o in offsets.items()])


def of_seeds(rows: pd.DataFrame, *lost: str) -> pd.DataFrame:
    """Return their runs, labelled 'PRECISION SEED'."""
    runs = rows.drop_duplicates("fingerprint")[["fingerprint", "label"]].reset_index(drop=True)
    words = runs["label"].str.split()
    configs = [pretrain(precision=arm, seed=int(seed)) for arm, seed in words]
    config = pd.DataFrame([{f"config.{key}": value for key, value in config.items()} for config in configs])
    states = np.where(runs["label"].isin(lost), "diverged", "finished")
    return with_arms(pd.concat([runs.assign(state=states, **{"choice.precision": words.str[0]}), config], axis=1))


def test_differences_are_paired_by_seed() -> None:
    rows = compared()
    top, bottom = loss_comparison.draw(rows, of_seeds(rows), "training_loss").axes
    assert [line.get_label() for line in top.lines] == ["bf16", "mxfp8"]
    assert bottom.get_ylabel() == "minus that of\nbf16, nats"
    assert np.allclose(bottom.lines[1].get_ydata(), 0.2)
    heights = np.concatenate([path.vertices[:, 1] for path in bottom.collections[0].get_paths()])
    assert (heights.min(), heights.max()) == pytest.approx((0.1, 0.3))


def test_perplexities_are_of_validations_and_a_diverged_run_ends_in_a_cross() -> None:
    rows = compared().rename(columns={"loss": "validation_loss"})
    lost = "mxfp8 1"
    top, _ = loss_comparison.draw(rows, of_seeds(rows, lost), "validation_perplexity").axes
    first, second = np.exp(5.0), np.exp(6.0)
    assert top.lines[0].get_ydata()[0] == pytest.approx((first + second) / 2)
    assert top.lines[-1].get_xydata().tolist() == [[32 * STEPS, pytest.approx(np.exp(5 - 0.05 * 49 + 1.3))]]


@pytest.mark.parametrize("last", [np.nan, np.inf])
def test_a_run_that_ends_without_a_number_has_its_cross_where_it_had_one(last: float) -> None:
    rows = compared()
    lost = "mxfp8 1"
    rows.loc[(rows["fingerprint"] == lost) & (rows["step"] == STEPS - 1), "loss"] = last
    top, _ = loss_comparison.draw(rows, of_seeds(rows, lost), "training_loss").axes
    assert top.lines[-1].get_xydata().tolist() == [
        [32 * (STEPS - 1), pytest.approx(5 - 0.05 * 48 + 1.3, abs=0.06)]
    ]  # smoothed
    runs = of_seeds(rows, lost).assign(parameters=[16, 32, 64, 128])
    *panels, _ = loss_and_gradient_norm.draw(runs, rows).axes
    crosses = [axes.lines[-1].get_xydata().tolist() for axes in (panels[1], panels[3])]
    assert crosses == [[[32 * (STEPS - 1), pytest.approx(5 - 0.05 * 48 + 1.3)]], [[32 * STEPS, pytest.approx(3.3)]]]


def test_a_sole_arm_has_no_panel_of_differences() -> None:
    rows = compared()
    alone = rows[rows["label"].str.startswith("bf16")]
    assert len(loss_comparison.draw(alone, of_seeds(alone), "training_loss").axes) == 1
    assert len(loss_curves.draw(alone, of_seeds(alone)).axes) == 1


def test_two_runs_of_one_arm_and_seed_are_refused() -> None:
    rows = pd.concat([compared(), curve("bf16 1", 2.0, fingerprint="again")])
    with pytest.raises(ValueError, match="two runs of the arm 'bf16' have the same seeds"):
        loss_comparison.draw(rows, of_seeds(rows), "training_loss")


def test_a_baseline_of_ones_own_and_one_that_is_no_arm(tmp_path: Path, monkeypatch, capsys) -> None:
    rows = compared()
    write_table(rows, tmp_path / "x_metrics.parquet", {})
    write_table(
        of_seeds(rows).drop(columns=["arm", "color", "name", "unit", "partner"]), tmp_path / "x_runs.parquet", {}
    )
    _, bottom = drawn(loss_comparison, monkeypatch, "--runs", str(tmp_path / "x"), "--baseline", "precision=mxfp8").axes
    assert bottom.get_ylabel() == "minus that of\nmxfp8, nats"
    with pytest.raises(SystemExit):
        loss_comparison.main(["--runs", str(tmp_path / "x"), "--baseline", "precision=bf15"])
    assert "--baseline: no run has precision=bf15; there are bf16; mxfp8" in capsys.readouterr().err


def test_a_column_an_arm_whatever_the_size_coloured_by_tokens_per_parameter() -> None:
    labels = [f"{p} {n}" for p in ("bf16", "mxfp8") for n in (4, 9)]
    metrics = pd.concat([curve(label, 0.1 * place) for place, label in enumerate(labels)])
    configs = [pretrain(precision=p, model__num_heads=int(n), train__steps=9) for p, n in map(str.split, labels)]
    runs = pd.DataFrame([{f"config.{key}": value for key, value in config.items()} for config in configs]).assign(
        fingerprint=labels, parameters=[16, 160, 16, 160], state="finished"
    )
    runs["choice.precision"] = [label.split()[0] for label in labels]
    runs.loc[3, "state"] = "diverged"
    figure = loss_and_gradient_norm.draw(runs, metrics)
    *panels, bar = figure.axes
    assert [axes.get_title() for axes in panels[:2]] == ["bf16", "mxfp8"]
    loss, norm = panels[1], panels[3]
    assert list(loss.lines[1].get_ydata()) == list(metrics.loc[metrics["label"] == labels[3], "loss"])
    assert list(norm.lines[0].get_ydata()) == [2.2] * STEPS
    assert [len(axes.lines) for axes in panels] == [2, 3, 2, 3]  # one more cross where one has diverged
    few, many = loss.lines[1].get_color(), loss.lines[0].get_color()
    assert few == panels[0].lines[1].get_color() != many
    assert [float(text.get_text()) for text in bar.get_yticklabels()][::4] == [10, 100]


def test_gains_of_a_language_model_are_drawn_by_what_their_norm_is_for() -> None:
    """There are two runs of one arm, with two layers. The second layer's and the second run's shares are doubled."""
    shares = {"attention.wqkv.norm": 0.1, "feed_forward.w13.norm": 0.2, "attention.q_norm": 0.01, "attention.k_norm": 0}
    columns = {
        f"layers.{i}.{name}.weight/floor/overflow_fraction": share * (1 + i)
        for name, share in shares.items()
        for i in (0, 1)
    }
    gaussian = {"gaussian.E4M3/floor/overflow_fraction": 0.0086}
    rows = [
        pd.DataFrame({"arm": arm, "fingerprint": f"{arm}{run}", "tokens": [32, 352]}).assign(
            **{name: share * run for name, share in columns.items()}, **gaussian
        )
        for arm in ("in mx", "in bf16")
        for run in (1, 2)
    ]
    gaps, *arms = fig03_language.draw(pd.concat(rows)).axes
    (line,) = gaps.lines
    assert (line.get_ydata()[0], line.get_xdata()[0]) == (12.5, 2.0**-6)
    assert line.get_ydata()[7] == pytest.approx(100 / 15)
    assert max(line.get_xdata()) == 416
    assert [axes.get_title() for axes in arms if axes.get_visible()] == ["in\nmx", "in\nbf16"]
    lines = {line.get_label(): list(line.get_ydata()) for line in arms[0].lines}
    assert lines["before the MLP"] == pytest.approx([40, 40])  # the median of 20, 40, 40 and 80
    assert lines["of keys"] == [0, 0]
    assert [*lines] == [*fig03_language.GAINS]


def rings() -> pd.DataFrame:
    """Return 64 features at two norms around step 5. Feature 7 explodes at the second norm."""
    rows = []
    for step in range(8):
        for norm in ("layers.0.ffn_norm", "norm"):
            absmax = np.linspace(1, 1.5, 64)
            absmax[7] *= 100 if norm == "norm" and step >= 5 else 1
            rows.append({"norm": norm, "step": step, "absmax": absmax.tolist()})
    return pd.DataFrame(rows).assign(fingerprint="a", label="seed=0", spike=5)


def test_the_feature_that_explodes_is_on_top_at_the_norm_where_it_does() -> None:
    maps = fig05_outlier_feature.around_spikes(rings(), None)
    heat, spike = maps["a"]
    assert (heat.index.name, heat.index[0], len(heat), spike) == ("feature at norm", 7, 24, 5)
    assert heat.loc[7, 5] > 100 > 2 > heat.loc[7, 4]
    metrics = curve("seed=0", 0.0, fingerprint="a", name="rmsnorm seed=0")
    top, bottom, _ = fig05_outlier_feature.draw(maps, metrics).axes
    assert list(top.lines[0].get_xdata()) == list(range(8))
    assert np.array_equal(np.asarray(bottom.collections[0].get_array()).reshape(heat.shape), heat)
    with pytest.raises(ValueError, match=r"no norm is called nrom; choose from layers\.0\.ffn_norm, norm"):
        fig05_outlier_feature.around_spikes(rings(), "nrom")


def test_without_a_spike_the_largest_activation_of_every_norm_is_drawn(tmp_path: Path, monkeypatch) -> None:
    heights = {"layers.0.ffn_norm/absmax": [1.0, 1.0, 1.0, 1.0], "norm/absmax": [1.0, 2.0, 3.0, 4.0]}
    steps = pd.DataFrame({"fingerprint": "a", "label": "seed=0", "step": range(4)} | heights)
    write_table(steps, tmp_path / "x_outlier_features.parquet", {})
    write_table(curve("seed=0", 0.0, fingerprint="a"), tmp_path / "x_metrics.parquet", {})
    run = {f"config.{key}": value for key, value in pretrain(train__batch_size=1, train__sequence_length=32).items()}
    write_table(pd.DataFrame([{"fingerprint": "a"} | run]), tmp_path / "x_runs.parquet", {})
    _, bottom, _ = drawn(fig05_outlier_feature, monkeypatch, "--runs", str(tmp_path / "x")).axes
    shown = np.asarray(bottom.collections[0].get_array()).reshape(2, 4)
    assert shown.tolist() == list(heights.values())
    assert [text.get_text() for text in bottom.get_yticklabels()] == ["layers.0.ffn_norm", "norm"]


def sized(arm: str, loss: float, params: int = 161279040, tokens: int = 22734700544) -> dict[str, object]:
    return {"weight_activation": arm, "params": params, "tokens": tokens, "min_val_loss": loss}


def test_differences_to_bf16_stand_beside_those_that_are_printed() -> None:
    runs = [sized("bfloat16_bfloat16", 0.71), sized("e5m2_bfloat16", 0.815), sized("e4m3_bfloat16", 0.7)]
    small = [sized("bfloat16_bfloat16", 2.0, 1000, 9000), sized("e4m3_bfloat16", 2.5, 1000, 9000)]
    table = table04_mitigations.differences(pd.DataFrame(runs + small))
    lines = table04_mitigations.markdown(table).splitlines()
    assert lines[0] == "| FLOPs | N | D/N | bf16 | E4M3 / bf16 | E5M2 / bf16 |"
    assert lines[2] == "| 5.40e+07 | 0.0M | 9.00 | 2.0000 | +0.5000 | - |"
    assert lines[3] == "| 2.20e+19 | 161.3M | 140.97 | 0.7100 (0.71) | -0.0100 (+0) | +0.1050 (+0.105) |"
    assert lines[5] == "Of 2 printed differences 1 are within 0.001 of those here."
    with pytest.raises(ValueError, match="no run is in bf16"):
        table04_mitigations.differences(pd.DataFrame(runs[1:]))


def test_precisions_with_layernorm_are_the_paper_s_arms() -> None:
    runs = pd.DataFrame({"choice.precision": ["mxfp8_bf16_act", "mxfp8_bf16_act", "mxfp4"]})
    norms = ["layernorm", "rmsnorm", "layernorm"]
    same = {"parameters": 2, "best_validation_loss": 1.0, "step": 5, "state": "finished", "label": "x"}
    same |= {"config.train.batch_size": 3, "config.train.sequence_length": 7, "fingerprint": "f"}
    rows, _ = from_runs(runs.assign(**{"choice.norm": norms}, **same))
    assert list(rows["weight_activation"]) == ["e4m3_bfloat16", "mxfp8_bf16_act rmsnorm", "mxfp4 layernorm"]
    assert list(rows["tokens"]) == [105] * 3


def test_models_stand_beside_what_is_printed_of_them() -> None:
    model = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "ffn_size": 4096}
    train = {"sequence_length": 4096, "batch_size": 32, "steps": 20000}
    run = {f"config.model.{k}": v for k, v in model.items()} | {f"config.train.{k}": v for k, v in train.items()}
    runs = pd.DataFrame([run | {"config.optimizer.lr": lr, "parameters": 122000000} for lr in (1e-3, 2e-3)])
    *_, row = models_table.markdown(runs, "mxnorm").splitlines()
    assert row == ("| 122,000,000 | 8 | 1,024 | 16 | 64 | 4 | 4,096 (1,536) | 4,096 | 32 | 0.001 to 0.002 | 2,621 |")
    *_, row = models_table.markdown(runs, "mxfp8").splitlines()
    assert "(" not in row  # this paper prints nothing for that model


def test_runs_are_chosen_by_choices_and_values_whatever_they_are_called(tmp_path: Path, capsys) -> None:
    fingerprints = ["ax", "bx", "cx", "ay"]
    write_table(pd.concat([curve(name, 0.0) for name in fingerprints]), tmp_path / "some_metrics.parquet", {})
    runs = pd.DataFrame(
        {"fingerprint": fingerprints, "label": "?", "choice.p": list("abca"), "config.m": [1.0, 1, 1, 2]}
    )
    write_table(
        runs.assign(**{"config.study": "pretrain", "config.on": [True, True, False, False]}),
        tmp_path / "some_runs.parquet",
        {},
    )
    options = style.figure_parser("script.py", "What it shows.")

    def chosen(*arguments: str) -> list[str]:
        asked = options.parse_args(["--runs", str(tmp_path / "some"), *arguments])
        return list(style.load_chosen(options, asked, "metrics")[0]["fingerprint"].unique())

    assert chosen() == fingerprints
    assert chosen("--only", "p=a", "p=b", "m=1") == ["ax", "bx"]
    assert chosen("--without", "p=b", "m=2e0") == ["ax", "cx"]
    assert chosen("--only", "on=true") == chosen("--only", "on=True") == ["ax", "bx"]
    assert chosen("--without", "on=True") == ["cx", "ay"]
    for words, said in {
        "p=d": "none of the 4 runs is left",
        "q=1": "q is neither a group nor a key of these runs",
    }.items():
        with pytest.raises(SystemExit):
            chosen("--only", words)
        assert f"--only, --without: {said}" in capsys.readouterr().err


def test_a_heading_has_a_word_a_line_and_three_digits() -> None:
    assert style.heading("mxnorm_p1 lr=0.001953125") == "mxnorm_p1\nlr=0.00195"

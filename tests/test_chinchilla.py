"""The scaling law recovers known constants, its intervals cover them, bad runs are refused, and table 2 is printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from each import each

from analysis.instability import chinchilla
from analysis.instability import table02_scaling_fits as table
from analysis.instability.chinchilla import Chinchilla, bootstrap, fit, objective
from analysis.instability.scaling_runs import from_runs

pytestmark = pytest.mark.usefixtures("figure_rules")
PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "scaling_law" / "validation_losses.csv"
published = pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the losses that the paper's authors published")

LAW = Chinchilla(A=1900.0, B=22000.0, E=0.53, alpha=0.5, beta=0.55)
RUNS_COLUMNS = ("parameters", "best_validation_loss", "config.train.batch_size", "config.train.sequence_length")


def synthetic(law: Chinchilla = LAW, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Return eight sizes at each of six compute budgets, with 2 to 200 tokens per parameter. `noise` is log L's std."""
    ratio = np.geomspace(2, 200, 8)
    budgets, ratio = np.meshgrid(np.geomspace(2e17, 5e19, 6), ratio)
    params = np.sqrt(budgets / (6 * ratio)).ravel()
    tokens = params * ratio.ravel()
    spread = np.exp(noise * np.random.default_rng(seed).normal(size=len(params)))
    return pd.DataFrame({"params": params, "tokens": tokens, "loss": law.loss(params, tokens) * spread})


@pytest.mark.integration
@pytest.mark.parametrize("law", [LAW, Chinchilla(A=406.4, B=410.7, E=1.69, alpha=0.34, beta=0.28)])
def test_exact_losses_give_the_law_back(law: Chinchilla) -> None:
    assert vars(fit(synthetic(law))) == pytest.approx(vars(law), rel=1e-3)


def test_the_objective_is_the_mean_huber_loss_of_log_losses_and_its_gradient() -> None:
    runs = synthetic(noise=2e-3)
    params, tokens, losses = (runs[name].to_numpy() for name in ("params", "tokens", "loss"))
    function, point = objective(params, tokens, losses), np.array([7.5, 10.1, -0.6, 0.5, 0.55])
    law = Chinchilla(*np.exp(point[:3]), *point[3:])
    error = np.abs(np.log(law.loss(params, tokens) / losses))
    huber = np.where(error < 1e-3, error**2 / 2, 1e-3 * (error - 1e-3 / 2)).mean()
    value, gradient = function(point)
    assert value * 1e-6 == pytest.approx(huber, rel=1e-12)
    steps = 1e-7 * np.eye(5)
    differences = [(function(point + step)[0] - function(point - step)[0]) / 2e-7 for step in steps]
    assert gradient == pytest.approx(differences, rel=1e-5)


@pytest.mark.integration
def test_outliers_do_not_move_the_law() -> None:
    runs = synthetic()
    runs.loc[::12, "loss"] *= 1.5
    law = fit(runs)
    assert (law.E, law.alpha, law.beta) == pytest.approx((LAW.E, LAW.alpha, LAW.beta), rel=1e-2)


def test_the_optimal_size_has_the_least_loss_of_its_budget() -> None:
    flops = 3e19
    params = np.geomspace(1e7, 1e10, 100_001)
    best = params[LAW.loss(params, flops / (6 * params)).argmin()]
    assert LAW.optimal_params(flops) == pytest.approx(best, rel=1e-3)
    assert LAW.optimal_params(10 * flops) / LAW.optimal_params(flops) == pytest.approx(10 ** (0.55 / 1.05))


@pytest.mark.slow
def test_intervals_cover_the_law_and_are_no_wider_than_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """One start is enough here, because these runs lie near their law. test_exact_losses uses them all."""
    monkeypatch.setattr(chinchilla, "STARTS", [chinchilla.COLD_START])
    names, laws, inside, widths = ["E", "alpha", "beta", "a"], [], [], []
    truth = pd.Series(vars(LAW) | {"a": LAW.a})[names]
    for seed in range(10):
        runs = synthetic(noise=5e-3, seed=seed)
        law = fit(runs)
        laws.append(vars(law) | {"a": law.a})
        low, high = bootstrap(runs, resamples=30, seed=seed)[names].quantile([0.025, 0.975]).to_numpy()
        inside.append((low <= truth) & (truth <= high))
        widths.append(high - low)
    assert (pd.DataFrame(inside).sum() >= 7).all()  # 7 of 10: at 95 %, fewer happen once in a thousand
    expected = 2 * 1.96 * pd.DataFrame(laws)[names].std()
    assert (np.mean(widths, axis=0) / expected).between(0.6, 1.7).all()


@pytest.mark.integration
def test_a_seed_gives_its_resamples() -> None:
    runs = synthetic(noise=5e-3)
    first, again, other = (bootstrap(runs, resamples=2, seed=seed) for seed in (0, 0, 1))
    assert first.equals(again)
    assert not first.equals(other)


@pytest.mark.integration
def test_a_run_that_is_listed_twice_is_no_second_run() -> None:
    runs = synthetic(noise=5e-3)
    once, twice = (bootstrap(frame, resamples=3) for frame in (runs, pd.concat([runs, runs])))
    assert once.to_numpy() == pytest.approx(twice.to_numpy(), rel=1e-2)


def changed(column: str, value: float) -> pd.DataFrame:
    runs = synthetic()
    runs.loc[3, column] = value
    return runs


@pytest.mark.integration
@each(
    ("runs", "says"),
    [
        (synthetic().rename(columns={"tokens": "token"}), "no column 'tokens'; did you mean 'token'?"),
        (synthetic().rename(columns={"loss": "x"}), "no column 'loss'; the first are params, tokens, x"),
        (
            synthetic().rename(columns={"tokens": "token", "loss": "x"}),
            "no column 'tokens', 'loss'; did you mean 'token'?",
        ),
        (changed("loss", np.nan), "loss of row 3: must be a positive, finite number, not nan"),
        (changed("loss", np.inf), "loss of row 3: must be a positive, finite number, not inf"),
        (changed("loss", -0.5), "loss of row 3: must be a positive, finite number, not -0.5"),
        (changed("params", 0), "params of row 3: must be a positive, finite number, not 0.0"),
        (synthetic().astype({"loss": object}).replace({"loss": {synthetic()["loss"][3]: "oops"}}), "not oops"),
        (synthetic()[:5], "5 runs of different sizes cannot determine 5 constants; give more"),
        (pd.concat([synthetic()[:5]] * 4), "5 runs of different sizes cannot determine 5 constants; give more"),
        (synthetic().assign(params=1e8), "params: the runs have 1 different values; give at least 3"),
        (synthetic().assign(loss=lambda r: r["params"] ** 0.1), "loss does not fall with params"),
        (synthetic().assign(loss=lambda r: r["tokens"] ** 0.1), "loss does not fall with params"),
        (synthetic().assign(loss=lambda r: 0.5 + 20 / r["params"] ** 0.2), "loss does not fall with tokens"),
        (synthetic().assign(loss=np.random.default_rng(0).uniform(1, 2, size=48)), "these runs follow no such law"),
    ],
)
def test_runs_that_give_no_law_are_refused(runs: pd.DataFrame, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        fit(runs)


def test_no_resamples_are_refused() -> None:
    with pytest.raises(ValueError, match="resamples: must be positive, not 0"):
        bootstrap(synthetic(), resamples=0)


@pytest.mark.slow
@published
def test_the_paper_s_table_2_to_every_printed_digit() -> None:
    arms = table.by_arm(pd.read_csv(PUBLISHED))
    laws = table.fit_arms(arms)
    rows = table.constants(arms, laws, resamples=2)
    assert list(rows["agrees"]) == ["yes"] * 36
    assert {arm: len(runs) for arm, runs in arms.items()} == dict(
        zip(table.PRINTED, (92, 80, 118, 80, 74, 76), strict=True)
    )
    assert rows[rows["arm"] == "e5m2_e5m2_forward_only"]["ours"].tolist() == (
        ["2.20e+03", "3.98e+04", "0.54", "0.51", "0.59", "0.54"]
    )
    assert vars(laws["bfloat16_bfloat16"]) == pytest.approx(
        {"A": 1942, "B": 21840, "E": 0.5307, "alpha": 0.5019, "beta": 0.5567}, rel=3e-4
    )


def written(tmp_path: Path, **columns: object) -> Path:
    runs = synthetic(noise=5e-3).rename(columns={"loss": "min_val_loss"}).assign(weight_activation="mine", **columns)
    runs.loc[47, "min_val_loss"] = np.nan
    runs.to_csv(tmp_path / "losses.csv", index=False)
    return tmp_path / "losses.csv"


@pytest.mark.slow
def test_the_command_writes_the_table_and_the_figure(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    mine = pd.read_csv(written(tmp_path))
    both = pd.concat([mine, mine.assign(weight_activation="bfloat16_bfloat16")])
    both.to_csv(tmp_path / "losses.csv", index=False)
    table.main(["--losses", "losses.csv", "--resamples", "4"])
    assert capsys.readouterr().out == f"figures/{table.NAME}.png\n"
    assert (tmp_path / "figures" / f"{table.NAME}.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "figures" / f"{table.NAME}.md").read_text()
    assert "- losses.csv: 96 rows, 2 of them without a loss\n" in text
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [line[0] for line in lines] == ["bfloat16 / bfloat16"] * 6 + ["mine"] * 6
    law = fit(mine.dropna(), "min_val_loss")
    exponent, paper_s = lines[11], lines[0]
    assert exponent[:4] == ["mine", "47", "a", f"{law.a:.2f}"]
    assert exponent[5:] == ["-", "-"]
    assert paper_s[3] != paper_s[5] == "1.94e+03"
    assert paper_s[6] == "no"


def test_the_figure_has_the_runs_and_the_least_loss_of_every_budget() -> None:
    runs = synthetic().rename(columns={"loss": table.LOSS})
    panel, *_ = table.draw({"mine": runs}, {"mine": LAW}).axes
    points, line = panel.collections[0].get_offsets(), panel.lines[0].get_xydata()
    assert np.allclose(points, np.column_stack([6 * runs["params"] * runs["tokens"], runs[table.LOSS]]))
    assert (np.interp(points[:, 0], *line.T) <= points[:, 1] * (1 + 1e-3)).all()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "No columns to parse"),
        ("weight_activation,params,tokens,min_val_los\n", "no column 'min_val_loss'; did you mean 'min_val_los'?"),
        ("weight_activation,params,tokens,min_val_loss\na,1,1,\n", "no run has a min_val_loss"),
        ("weight_activation,params,tokens,min_val_loss\na,1,1,1\n", "a: 1 runs of different sizes cannot determine"),
    ],
)
def test_a_bad_file_ends_the_command_in_a_line(text: str | None, says: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "losses.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        table.main(["--losses", str(path)])
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_finished_runs_of_a_runs_table_are_rows_like_the_paper_s() -> None:
    states = ["finished", "diverged"]
    runs = pd.DataFrame({name: [2, 3] for name in RUNS_COLUMNS} | {"state": states, "step": 10})
    runs = runs.assign(**{"choice.precision": "bf16", "choice.norm": "rmsnorm", "fingerprint": states, "label": "x"})
    rows, said = from_runs(runs)
    assert rows.to_dict("records") == [
        {"weight_activation": "bf16 rmsnorm", "params": 2, "tokens": 40, "min_val_loss": 2}
    ]
    assert "- x: 1 run (finished)" in said
    with pytest.raises(ValueError, match="no column 'parameters'"):
        from_runs(runs.drop(columns="parameters"))


def test_n_counts_32_000_of_the_32_100_rows_that_the_public_code_trains() -> None:
    """OLMo's N at n = 4 is 19,534,080 (instability paper, appendix G), with either embedding."""
    about = {"state": "finished", "choice.precision": "bf16", "choice.norm": "layernorm", "label": "x", "step": 5}
    about |= {
        "fingerprint": "f",
        "best_validation_loss": 1.0,
        "config.train.batch_size": 1,
        "config.train.sequence_length": 1,
    }
    runs = [about | {"config.model.hidden_size": 256, "config.model.vocab_size": rows} for rows in (32_000, 32_100)]
    for run, parameters in zip(runs, (19_534_080, 19_534_080 + 2 * 100 * 256), strict=True):
        run["parameters"] = parameters
    rows, _ = from_runs(pd.DataFrame(runs))
    assert [*rows["params"]] == [19_534_080] * 2

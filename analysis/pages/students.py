"""The parts of the page about what makes students diverge, from the tables of its sweeps; fractions are of all runs."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd
from scipy import stats

from analysis.instability.fig04_interventions import judged
from analysis.instability.fig06_learning_rate_grid import rates
from analysis.pages.decisive_arms import DECISIVE_ARMS
from analysis.pages.marks import Parts, rows, rows_of, share, wilson
from analysis.students import measures, sharpness
from analysis.students.arms import REPLICA, ended
from mxstudy.results import markdown

# ------------------------------------------------------------------------------------------------------------- forks

CHANGED = {
    "none": "nothing (`none`)",
    "bf16_act": "activations and their gradients in bf16 (`bf16_act`)",
    "bf16_act_fwd": "activations in bf16 in the forward and where wgrad reads them (`bf16_act_fwd`)",
    "bf16_weight": "weights in bf16 in forward and dgrad (`bf16_weight`)",
    "forward_only": "nothing quantised in the backward (`forward_only`)",
    "fp32": "FP32 throughout (`fp32`)",
    "gain_fp32": "gains in FP32 (`gain_fp32`)",
    "norm_fp32": "norms and gains in FP32 (`norm_fp32`)",
    "rceil": "scales by rceil (`rceil`)",
}


@cache
def forks() -> pd.DataFrame:
    return judged(rows_of("forks", "interventions"), rows_of("runs", "interventions"))


def at(point: str, name: str) -> pd.DataFrame:
    found = forks()
    return found[(found["point"] == point) & (found["intervention"] == name)]


def interventions() -> str:
    cells = []
    for name, words_of_it in CHANGED.items():
        cell = [words_of_it]
        for point in ("0.88", "before 10"):
            own = at(point, name)
            lost = (own["diverged"] > 0).sum()
            cell += [share(lost, len(own), int(own["open"].sum())), wilson(lost, len(own))]
        cells.append(cell)
    columns = ["changed from there on", "at 0.88", "95 %, forks", "10 steps before", "95 %, forks"]
    return markdown(columns, cells, left=columns)


# ------------------------------------------------------------------------------------------------------ measurements

MEASURED = {"mxfp8 public_code": "MXFP8, public code", "mxfp8 clean": "MXFP8, clean"} | {
    "bf16 public_code": "bf16, public code",
    "bf16 clean": "bf16, clean",
}


def by_measured_arm(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    arm = runs["choice.precision"] + " " + runs["choice.fidelity"]
    return {name: runs[arm == key] for key, name in MEASURED.items()}


def gradient_bias() -> str:
    runs = ended(rows_of("runs", "gradient_bias"))
    same, coupled = (rows_of(kind, "gradient_bias") for kind in ("gradient_bias", "coupled_gradient_bias"))
    quantities = (
        (same, "model/ratio"),
        (same, "model/cosine"),
        (coupled, "model/squared_ratio"),
        (coupled, "model/cosine"),
    )
    cells = []
    for name, own in by_measured_arm(runs).items():
        medians = [before(own, frame, column) for frame, column in quantities]
        open_runs = int(own["open"].sum())
        cells.append((name, *medians, share((own["diverged"] > 0).sum(), len(own), open_runs)))
    columns = [
        *(
            "arm",
            "ratio, same weights",
            "cosine, same weights",
            "squared ratio, coupled",
            "cosine, coupled",
            "diverged",
        ),
    ]
    return markdown(columns, cells, left=columns)


def before(runs: pd.DataFrame, frame: pd.DataFrame, column: str) -> str:
    """Return the median over replicas of each one's median before its divergence, with the least and the most."""
    found = frame.merge(runs[[*REPLICA, "outcome.diverged_at"]]).dropna(subset=column).sort_values("step")
    return measures.cells(found, column)[0]


def eigenvalues() -> str:
    runs, found = ended(rows_of("runs", "gradient_bias")), rows_of("sharpness", "gradient_bias")
    scaled, _ = sharpness.rows_of(found)
    cells = []
    for name, own in by_measured_arm(runs).items():
        kinds = {}
        for kind in ("hessian", "preconditioned"):
            merged = scaled.frame.merge(own[[*REPLICA, "outcome.diverged_at"]]).dropna(subset=kind).sort_values("step")
            kinds[kind] = measures.cells(merged, kind)
        (h_before, _, _, _, h_after), (p_before, last, _, _, p_after) = kinds.values()
        cells.append((name, h_before, h_after, p_before, last, p_after))
    columns = ["arm", "Hessian, before", "after", "preconditioned, before", "the last before", "after"]
    return markdown(columns, cells, left=columns)


LAST_BIN_ARMS = {
    "mxfp8 public_code code": "MXFP8, public code (gains in bf16), teacher `code`",
    "mxfp8 paper_text code": "MXFP8, paper's text (gains in MX), teacher `code`",
    "mxfp8 paper_text paper": "MXFP8, paper's text (gains in MX), teacher `paper`",
    "fp32 none code": "FP32 (as if cast), teacher `code`",
}
GAINS, INPUTS = (
    "layers.0.up.norm.weight/floor/overflow_fraction",
    r"^layers\.\d+\.(up|down)\.input/floor/overflow_fraction$",
)


def last_bin() -> str:
    runs, found = ended(rows_of("runs", "overflow")), rows_of("last_bin", "overflow")
    measured = found[[*REPLICA, "step"]].assign(
        gains=100 * found[GAINS], inputs=100 * found.filter(regex=INPUTS).mean(axis=1)
    )
    arm = runs["choice.precision"] + " " + runs["choice.fidelity"] + " " + runs["choice.teacher"]
    cells = []
    for key, name in LAST_BIN_ARMS.items():
        for which, own in (
            (" that diverge", runs[(arm == key) & (runs["diverged"] > 0)]),
            (" that do not", runs[(arm == key) & ~(runs["diverged"] > 0)]),
        ):
            if len(own):
                rows_of_it = measured.merge(own[[*REPLICA, "outcome.diverged_at"]]).sort_values("step")
                living = rows_of_it[~(rows_of_it["step"] >= rows_of_it["outcome.diverged_at"])].groupby(REPLICA)
                most, last = living["gains"].max(), living["gains"].last()
                ends = "-" if which == " that do not" else measures.spread(last.tolist())
                cells.append(
                    (
                        name + which,
                        len(own),
                        measures.spread(most.tolist()),
                        ends,
                        measures.spread(living["inputs"].median().tolist()),
                    )
                )
    columns = [
        "runs",
        "",
        "gains of the first block, at their most, %",
        "just before the divergence, %",
        "activations, %",
    ]
    return markdown(columns, cells, left=["runs"])


# ----------------------------------------------------------------------------------------------------- learning rates

GRID = {"mx_mix": "MX mix (E4M3 forward, E5M2 backward)", "mxfp6_e2m3": "E2M3", "fp32": "FP32"}
GRID_NAMES = {"mxfp6_e2m3": "E2M3", "mx_mix": "MX mix"}
SMALL = ("lr 1e-05", "lr 5e-05", "lr 0.0001")
RATES = {"lr 0.0005": "5e-4", "lr 0.001": "1e-3", "cosine lr 0.001": "1e-3 to 1e-5, cosine"}


@cache
def grid() -> pd.DataFrame:
    runs = ended(rows_of("runs", "learning_rate_grid"))
    return runs.assign(rate=rates(runs))


def learning_rates() -> str:
    runs = grid()
    parts = {"1e-5, 5e-5 and 1e-4": runs["rate"].isin(SMALL)} | {
        said: runs["rate"] == key for key, said in RATES.items()
    }
    cells = []
    for name, chosen in parts.items():
        cell = [name]
        for precision in GRID:
            own = runs[chosen & (runs["choice.precision"] == precision)]
            lost, open_runs = (own["diverged"] > 0).sum(), int(own["open"].sum())
            cell.append(share(lost, len(own), open_runs) + (f" ({wilson(lost, len(own))})" if lost else ""))
        cells.append(cell)
    columns = ["learning rate", *GRID.values()]
    return markdown(columns, cells, left=columns)


WIDTH, SIZE = "config.model.hidden_size", ["config.model.num_layers", "config.model.hidden_size"]


def counted(width: int, rate: str, precision: str | None = None) -> str:
    """Return how many students of a width diverge at a rate, and how many are open: '4 of 30, 5 open'."""
    runs = grid()
    own = runs[(runs[WIDTH] == width) & (runs["rate"] == rate)]
    own = own if precision is None else own[own["choice.precision"] == precision]
    return share((own["diverged"] > 0).sum(), len(own), int(own["open"].sum()))


@cache
def grid_pairs(one: str, other: str) -> pd.DataFrame:
    """Return whether each student of two precisions diverged, by size, rate and seeds that both have."""
    runs = grid()
    key = [*SIZE, "rate", "config.seed", "config.data_seed"]
    parts = (runs[runs["choice.precision"] == name].set_index(key)["diverged"] > 0 for name in (one, other))
    return pd.concat(parts, axis="columns", keys=("one", "other"), join="inner").astype(float)


def alone(precision: str, rate: str) -> str:
    """Return of how many pairs with FP32 the one alone diverges, and the other: '6 to 2'."""
    pairs = grid_pairs(precision, "fp32").xs(rate, level="rate")
    less = pairs["one"] - pairs["other"]
    return f"{(less > 0).sum()} to {(less < 0).sum()}"


def by_size(one: str, other: str = "fp32") -> str:
    """Return in how many sizes the one diverges more often, and less: '6 sizes and less often in 0 (p = 0.03)'."""
    means = grid_pairs(one, other).groupby(level=[0, 1]).mean()
    more, less = (int((part > 0).sum()) for part in (means["one"] - means["other"], means["other"] - means["one"]))
    return f"{more} sizes and less often in {less} (p = {stats.binomtest(more, more + less).pvalue:.2g})"


def zeta(precision: str) -> str:
    """Return the median squared ratio of both arms of a precision, coupled: '1.2', or '1.2 to 1.3'."""
    runs, coupled = ended(rows_of("runs", "gradient_bias")), rows_of("coupled_gradient_bias", "gradient_bias")
    arms = by_measured_arm(runs[runs["choice.precision"] == precision])
    found = [before(own, coupled, "model/squared_ratio") for own in arms.values() if len(own)]
    return " to ".join(dict.fromkeys(f"{float(text.split()[0]):.1f}" for text in found))


def small_rates() -> str:
    runs = grid()
    return (
        str(runs["rate"].isin(SMALL).sum()) if not (runs.loc[runs["rate"].isin(SMALL), "diverged"] != 0).any() else "?"
    )


def speed() -> str:
    cells = [
        (f"`{one['teacher']}`", one["replicas"], *(f"{one[key]:,.0f}" for key in ("study", "eager", "ceiling")))
        for one in rows("student_teacher_speed")
    ]
    return markdown(["teacher", "replicas", "study", "eager", "ceiling"], cells, left=["teacher"])


STUDENT_TEACHER: Parts = {
    **DECISIVE_ARMS,
    "interventions": interventions,
    "gradient bias": gradient_bias,
    "sharpness": eigenvalues,
    "last bin": last_bin,
    "learning rates": learning_rates,
    "speed": speed,
    **{f"zeta in {name}": partial(zeta, name) for name in ("mxfp8", "bf16")},
    "width 256 at 5e-4": partial(counted, 256, "lr 0.0005"),
    "width 256 at 1e-3": partial(counted, 256, "lr 0.001"),
    "FP32 of width 768 at 5e-4": partial(counted, 768, "lr 0.0005", "fp32"),
    **{f"{GRID_NAMES[p]} alone, {rate}": partial(alone, p, key) for p in GRID_NAMES for key, rate in RATES.items()},
    **{f"{name} by size": partial(by_size, p) for p, name in GRID_NAMES.items()},
    "E2M3 and MX mix by size": partial(by_size, "mxfp6_e2m3", "mx_mix"),
    "small rates": small_rates,
    "bf16 activations at 0.88": lambda: share(
        (at("0.88", "bf16_act")["diverged"] > 0).sum(), len(at("0.88", "bf16_act"))
    ),
}

"""Make the parts of the pages about a recipe's ingredients and several GPUs, from the JSON of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from analysis.pages.marks import Parts, benchmark, frame, least_and_most, one_or_range, row, rows
from analysis.pages.step_cost import STEPS
from mxstudy.results import markdown, plus_minus


def ingredients() -> str:
    parts = benchmark("recipe_ingredients")["train_step"]
    when = {"before": "before, ms", "after": "after, ms", "before, again": "before, again, ms"}
    cells = []
    for arm in ("bf16", "mxfp8, rmsnorm", "mxfp8, mxnorm_p2", "sr_rht_2d, rmsnorm"):
        found = [next((one for one in parts[time]["rows"] if one["arm"] == arm), None) for time in when]
        cells.append(
            (STEPS[arm], *(plus_minus(one["step_ms"], one["spread_ms"], ".1f") if one else "-" for one in found))
        )
    settings = parts["after"]["settings"]
    head = f"step of {settings['model']}, FFN {settings['ffn']}, vocabulary {settings['vocabulary']:,}"
    return markdown([head, *when.values()], cells, left=[head])


CASTS = {
    "copy x": "copy of x",
    "cast_one even -1": "E4M3, rows, by `cast_one`",
    "even row": "E4M3, rows, to nearest",
    "SR row": "E4M3, rows, stochastic",
    "cast_one even -2": "E4M3, columns, by `cast_one`",
    "even column": "E4M3, columns, to nearest",
    "SR column": "E4M3, columns, stochastic",
    "H16 even column": "Hadamard 16, columns, to nearest",
    "H16 SR column": "Hadamard 16, columns, stochastic",
    "H128 SR column": "Hadamard 128, columns, stochastic",
    "H128 SR row": "Hadamard 128, rows, stochastic",
    "copy w, fp32 to bf16": "copy of W to bf16",
    "W 16x16 row": "W, 16 x 16 blocks, rows",
    "W 16x16 column": "W, 16 x 16 blocks, columns",
    "cast_one even -1 of w": "W, rows, by `cast_one`",
}


def casts() -> str:
    of = {one["case"]: one for one in benchmark("recipe_ingredients")["casts"]}
    cells = []
    for case, said in CASTS.items():
        over = "1" if of[case]["over_copy"] == 1 else f"{of[case]['over_copy']:.2f}"
        cells.append((said, f"{of[case]['ms']:.3f}", f"{of[case]['tb_per_s']:.2f}", over))
    return markdown(["operand", "ms", "TB/s", "over the copy"], cells, left=["operand"])


def all_three() -> str:
    of = {one["arm"]: one["step_ms"] for one in benchmark("recipe_ingredients")["train_step"]["after"]["rows"]}
    return f"{of['sr_rht_2d, rmsnorm'] / of['mxfp8, rmsnorm']:.3f}"


def student_rate(when: str) -> str:
    (one,) = benchmark("recipe_ingredients")["student_teacher"][when]["rows"]
    return f"{one['study']:,.0f}"


def of_weight() -> str:
    (one,) = (one for one in benchmark("recipe_ingredients")["casts"] if one["case"] == "cast_one even -1 of w")
    return f"{one['over_copy']:.1f} times"


def of_all_steps(column: str, form: str) -> str:
    """Return the least and the most of a column over all steps with MXFP8."""
    parts = benchmark("recipe_ingredients")["train_step"].values()
    return one_or_range(
        pd.Series([one[column] for part in parts for one in part["rows"] if one["arm"] != "bf16"]), form
    )


INGREDIENTS: Parts = {
    "a weight": of_weight,
    "memory": partial(of_all_steps, "peak_gib", ".1f"),
    "rounds": partial(of_all_steps, "rounds", "d"),
    "steps": ingredients,
    "casts": casts,
    "all three": all_three,
    "students before": partial(student_rate, "before"),
    "students after": partial(student_rate, "after"),
}


def scaling() -> str:
    said = {"bf16": "bf16", "mxfp8": "MXFP8, MXNorm p=2"}
    cells = []
    for one in sorted(rows("scaling"), key=lambda one: (one["model"], one["precision"], one["gpus"])):
        cells.append(
            (
                one["model"],
                said[one["precision"]],
                one["gpus"],
                plus_minus(one["step_ms"], one["spread_ms"], ".1f"),
                f"{round(one['tokens_per_s_a_gpu'], -2):,.0f}",
                efficiency(one),
                f"{one['mfu']:.3f}",
                f"{one['peak_gib']:.1f}",
            )
        )
    columns = [
        *("model", "precision", "GPUs", "step, ms, +- half the quartiles' range", "tokens/s a GPU", "efficiency"),
        *("MFU", "peak a GPU, GiB"),
    ]
    order = sorted(cells, key=lambda cell: cell[0] != "llama_1b")
    return markdown(columns, order, left=["model", "precision"])


def efficiency(one: dict[str, Any]) -> str:
    found = one["efficiency"]
    if found is None or pd.isna(found):
        return "-"
    return "1" if found == 1 else f"{found:.3f}"


def lost(precision: str) -> str:
    return f"{100 * (1 - row('scaling', model='llama_1b', precision=precision, gpus=8)['efficiency']):.1f} %"


def from_two_to_eight() -> Iterator[float]:
    for precision in ("bf16", "mxfp8"):
        two, eight = (row("scaling", model="llama_1b", precision=precision, gpus=n)["step_ms"] for n in (2, 8))
        yield 100 * (eight / two - 1)


HERE, THERE = "scaling", "scaling_4_gpus"  # hosts


def case(host: str, precision: str, gpus: int, model: str = "llama_1b") -> dict[str, Any]:
    return row(host, model=model, precision=precision, gpus=gpus)


def milliseconds(host: str, precision: str, gpus: int) -> str:
    return f"{case(host, precision, gpus)['step_ms']:.1f}"


def of_four(host: str, precision: str) -> str:
    """Return the efficiency of four GPUs."""
    return f"{case(host, precision, 4)['efficiency']:.3f}"


def apart(precision: str, gpus: int) -> str:
    """Return by how much a step is shorter on the other host, in percent."""
    less = 1 - case(THERE, precision, gpus)["step_ms"] / case(HERE, precision, gpus)["step_ms"]
    return f"{100 * less:.1f} %"


def with_the_second(precision: str) -> float:
    """Return the efficiency that two GPUs lose, as a share of what eight GPUs lose."""
    two, eight = (1 - case(HERE, precision, gpus)["efficiency"] for gpus in (2, 8))
    return float(two / eight)


def spreads() -> str:
    """Return the spread of a step of several GPUs in percent of the step: the least and the most."""
    found = frame(HERE).query("model == 'llama_1b' and gpus > 1")
    return least_and_most(100 * found["spread_ms"] / found["step_ms"], ".1f") + " %"


def of_8b(host: str, gpus: int) -> str:
    one = case(host, "mxfp8", gpus, "llama_8b")
    ms = plus_minus(one["step_ms"], one["spread_ms"], ".1f")
    return f"{ms} ms (MFU {one['mfu']:.3f}, {one['peak_gib']:.1f} GiB a GPU)"


SCALING: Parts = {
    "cases": scaling,
    "bf16": partial(lost, "bf16"),
    "MXFP8": partial(lost, "mxfp8"),
    "two to eight": lambda: f"{max(from_two_to_eight()):.1f} %",
    "spreads": spreads,
    "with the second": lambda: (
        least_and_most(100 * pd.Series([*map(with_the_second, ("bf16", "mxfp8"))]), ".0f") + " %"
    ),
    "bf16, one GPU there": partial(milliseconds, THERE, "bf16", 1),
    "bf16, one GPU less": partial(apart, "bf16", 1),
    "bf16, four GPUs less": partial(apart, "bf16", 4),
    "bf16, four GPUs there": partial(of_four, THERE, "bf16"),
    "bf16, eight over one there": lambda: f"{case(THERE, 'bf16', 1)['step_ms'] / case(HERE, 'bf16', 8)['step_ms']:.3f}",
    **{
        f"MXFP8, {said}": partial(milliseconds, host, "mxfp8", gpus)
        for said, host, gpus in (
            ("one GPU there", THERE, 1),
            ("one GPU here", HERE, 1),
            ("four GPUs there", THERE, 4),
            ("four GPUs here", HERE, 4),
        )
    },
    **{
        f"MXFP8, efficiency {said}": partial(of_four, host, "mxfp8")
        for said, host in (("there", THERE), ("here", HERE))
    },
    "parameters": lambda: f"{case(HERE, 'mxfp8', 8, 'llama_8b')['parameters'] / 1e9:.2f} billion",
    "seconds to build": lambda: f"{case(HERE, 'mxfp8', 8, 'llama_8b')['build_s']:.0f} s",
    "llama_8b on four": partial(of_8b, THERE, 4),
}


GATHERED = {"compute": "bf16", "mx": "MX codes and scales"}  # {train.all_gather: its name on the page}


def gathering() -> str:
    cells = [
        (
            GATHERED[one["all_gather"]],
            f"{one['forward_bytes_a_parameter']:.2f}",
            f"{one['backward_bytes_a_parameter']:.2f}",
            f"{one['forward_bytes'] / 1e9:.2f}",
            gathered_ms(one["all_gather"]),
            f"{one['peak_gib']:.1f}",
            f"{one['loss']:.4f}",
        )
        for one in rows("all_gather")
    ]
    columns = ["weights gathered as", "bytes a parameter, forward", "backward", "GB a direction"]
    columns += ["step, ms, +- half the quartiles' range", "peak a GPU, GiB", "loss after all steps"]
    return markdown(columns, cells, left=columns[:1])


def gathered_ms(how: str) -> str:
    one = row("all_gather", all_gather=how)
    return plus_minus(one["step_ms"], one["spread_ms"], ".1f")


def longer() -> str:
    """Return how much longer a step with weights gathered in MX is, in percent."""
    bf16, mx = (row("all_gather", all_gather=how)["step_ms"] for how in GATHERED)
    return f"{100 * (mx / bf16 - 1):.0f} %"


def gathered_bytes(how: str) -> str:
    """Return the bytes a parameter, which are the same in both directions."""
    one = row("all_gather", all_gather=how)
    (found,) = {f"{one[f'{direction}_bytes_a_parameter']:.2f}" for direction in ("forward", "backward")}
    return found


def gathered_losses() -> str:
    """Return how the losses of both cases compare in runs with deterministic sums."""
    bf16, mx = (row("all_gather_deterministic", all_gather=how)["loss"] for how in GATHERED)
    return "the same loss, bit for bit" if bf16 == mx else f"losses that differ by {abs(bf16 - mx):.1g}"


ALL_GATHER: Parts = {
    "losses": gathered_losses,
    "loss": lambda: f"{row('all_gather_deterministic', all_gather='mx')['loss']:.6f}",
    "cases": gathering,
    "longer": longer,
    **{f"bytes, {how}": partial(gathered_bytes, how) for how in GATHERED},
    **{f"step, {how}": partial(gathered_ms, how) for how in GATHERED},
}

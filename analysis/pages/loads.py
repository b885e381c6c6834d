"""Make the parts of the pages about data, launching, evaluating and probing, from the JSON of benchmarks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from analysis.pages.language_models import pretrained
from analysis.pages.marks import Parts, benchmark, commit_of, frame, least_and_most, row, rows, share_of
from mxstudy.results import markdown, plus_minus


def batches() -> str:
    fed = benchmark("data")["settings"]["gpu_tokens_per_s"]
    places = {"memory": "files in memory", "disk": "files that the system was told to forget"}
    of = {row["batches_from"]: row for row in rows("data") if "batches_from" in row}
    cells = [
        (said, millions(of[key]["tokens_per_s"], 0), f"{of[key]['times_gpu']:.0f}") for key, said in places.items()
    ]
    head = "batches, one thread"
    return markdown([head, "tokens/s", f"over one H200's {fed:,} tokens/s"], cells, left=[head])


def tokenising() -> str:
    said = {
        "prepare": "`prepare`: reading, sha256, duplicates, split, shards, verification",
        "datasets.map, batches of 100": "`datasets.map`, batches of 100",
        "datasets.map, batches of 1000": "`datasets.map`, batches of 1,000",
    }
    settings = benchmark("data")["settings"]
    head = f"tokenising {settings['bytes'] / 1e6:.0f} MB of Python source, {settings['workers']} processes"
    cells = []
    for key, words in said.items():
        one = row("data", tokenising=key)
        over = "1" if one["over_map"] == 1 else f"{one['over_map']:.2f}"
        cells.append((words, millions(one["tokens_per_s"]), millions(one["tokens_per_cpu_s"]), over))
    return markdown([head, "tokens/s", "tokens a second of CPU", "over `datasets.map`"], cells, left=[head])


def millions(value: float, digits: int = 2) -> str:
    return f"{value / 1e6:.{digits}f} M"


def of_fastest() -> str:
    rates = [row("data", batches_from=place)["tokens_per_s"] for place in ("disk", "memory")]
    fastest = pretrained()["tokens_per_s"].max()
    return " to ".join(f"{rate / fastest:.0f}" for rate in rates)


DATA: Parts = {
    "documents": lambda: f"{benchmark('data')['settings']['documents']:,}",
    "batches": batches,
    "tokenising": tokenising,
    "least times": lambda: f"{row('data', batches_from='disk')['times_gpu']:.0f}",
    "most times": lambda: f"{row('data', batches_from='memory')['times_gpu']:.0f}",
    "fastest": lambda: f"{pretrained()['tokens_per_s'].max():,.0f}",
    "times the fastest arm of now": of_fastest,
    "over map": lambda: f"{row('data', tokenising='prepare')['over_map']:.2f}",
}


def answering() -> str:
    said = {
        "ours, rmsnorm, mxfp8, compute bf16": "ours, MXFP8",
        "forwards of ours, bf16, alone": "our forwards alone, bf16",
        "forwards of ours, mxfp8, alone": "our forwards alone, MXFP8",
    }
    cells = []
    for one in rows("evaluation_speed"):
        once = one["rounds"] == 1
        seconds = f"{one['seconds']:.2f}, one round" if once else f"{one['least_s']:.2f} .. {one['most_s']:.2f}"
        spread = "" if once or one["over_hflm"] == 1 else f" ({one['least_over']:.2f} .. {one['most_over']:.2f})"
        over = "1" if one["over_hflm"] == 1 else f"{one['over_hflm']:.2f}{spread}"
        cells.append((said.get(one["who"], one["who"]), f"{one['requests_per_s']:,.0f}", seconds, over))
    columns = ["who", "requests/s", "seconds, least .. most", "over HFLM's best, least .. most"]
    return markdown(columns, cells, left=columns)


def over_hflm(who: str, form: str = "{over_hflm:.1f}") -> str:
    return form.format(**row("evaluation_speed", who=who))


def rounds_over(who: str, target: float) -> str:
    """Return in how many rounds the rate was at least `target` times HFLM's: '8 of 9'."""
    own, other = (row("evaluation_speed", who=each)["rounds_s"] for each in (who, best_of_hflm()))
    return share_of(pd.Series(other) / pd.Series(own) >= target)


def best_of_hflm() -> str:
    """Return the name of HFLM's row that the others are compared with."""
    (found,) = (one["who"] for one in rows("evaluation_speed") if one["over_hflm"] == 1)
    return str(found)


def batch_of_hflm() -> str:
    return best_of_hflm().rpartition(" ")[2]


def right() -> str:
    return least_and_most(100 * frame("evaluation_speed")["right"], ".1f") + " %"


OURS = {"bf16": "ours, bf16", "MXFP8": "ours, rmsnorm, mxfp8, compute bf16"}
TARGETS = {"bf16": 5.0, "MXFP8": 4.0}  # times HFLM's requests a second; stated before the measurement
EVALUATION: Parts = {
    "requests": lambda: f"{rows('evaluation_speed')[0]['requests']:,}",
    "rounds": lambda: f"{benchmark('evaluation_speed')['settings']['rounds']}",
    "right": right,
    "HFLM's batch": batch_of_hflm,
    "who": answering,
    **{said: partial(over_hflm, who) for said, who in OURS.items()},
    **{f"{said}, spread": partial(over_hflm, who, "{least_over:.1f} .. {most_over:.1f}") for said, who in OURS.items()},
    **{f"{said}, rounds": partial(rounds_over, who, TARGETS[said]) for said, who in OURS.items()},
}


LAUNCH_LIMITS = {"values": 4.0, "groups": 10.0, "dry run": 10.0, "config": 1.5}  # seconds
SECONDS = ("fastest, s", "slowest, s", "limit, s", "rounds within it")


def jobs() -> str:
    said = {"values": "values", "groups": "group choices"}
    cells = [(timed(name)["jobs"], words, *seconds_of(name)) for name, words in said.items()]
    return markdown(["jobs", "vary in", *SECONDS], cells, left=["vary in"])


def printing() -> str:
    cells = [(f"`python -m mxstudy {timed(name)['command']}`", *seconds_of(name)) for name in ("dry run", "config")]
    return markdown(["command", *SECONDS], cells, left=["command"])


def timed(name: str) -> dict[str, Any]:
    """Return the row of a sweep, by what varies in it, or of a command that prints something."""
    (found,) = (one for one in rows("launch") if name in (one.get("vary_in"), one.get("prints")))
    return found


def seconds_of(name: str) -> tuple[str, ...]:
    """Return the cells of a row in the columns SECONDS."""
    one, limit = timed(name), LAUNCH_LIMITS[name]
    return f"{one['fastest_s']:.1f}", f"{one['slowest_s']:.1f}", f"{limit:g}", within(name)


def within(name: str) -> str:
    """Return in how many rounds the limit was met: '4 of 5'."""
    return share_of(pd.Series(timed(name)["rounds_s"]) <= LAUNCH_LIMITS[name])


def launched(name: str) -> str:
    return least_and_most(pd.Series(timed(name)["rounds_s"]), ".1f") + " s"


LAUNCH: Parts = {
    "jobs": jobs,
    "printing": printing,
    "commit": lambda: commit_of("launch"),
    "load": lambda: f"{benchmark('launch')['settings']['load']:.1f}",
    **{name: partial(launched, name) for name in LAUNCH_LIMITS},
    **{f"{name}, within": partial(within, name) for name in ("values", "dry run")},
}


class ProbeRun(NamedTuple):
    """Say where and when probes were measured, what computed them, and whether steps were launched ahead of the GPU."""

    on: str
    date: str
    computed_by: str
    launched_ahead: str


PROBED, ON_THE_H100, BEFORE = "probe_overhead", "probe_overhead_h100_kernels", "probe_overhead_h100_pytorch"
MEASUREMENTS = {
    PROBED: ProbeRun("an H200, alone", "2026-11-27", "kernels", "yes"),
    ON_THE_H100: ProbeRun("an H100, alone", "2026-11-27", "kernels", "yes"),
    BEFORE: ProbeRun("another H100, alone", "2026-11-26", "PyTorch", "yes"),
    "probe_overhead_h200": ProbeRun("an H200, beside `benchmarks.experts`", "2026-11-26", "PyTorch", "no"),
    "probe_overhead_h100": ProbeRun("an H100, beside four trainings", "2026-11-25", "PyTorch", "no"),
    "probe_overhead_earlier": ProbeRun("an H200, beside a tokenizer at first", "2026-11-21", "PyTorch", "no"),
}
EVERY_100, EVERY_STEP, WATCH = "all but gradient_bias", "norm_output_rms", "spike watch, ring of features"


def probes() -> str:
    """Return the table of what each set of probes costs in the newest measurement."""
    said = {WATCH: "outlier_features, their ring, the watch for spikes"}
    cells = [
        (
            said.get(one["probes"], one["probes"]),
            one["every_steps"],
            plus_minus(one["extra_ms"], one["extra_spread_ms"], ".1f"),
            overhead(PROBED, one["probes"], ".2f"),
            f"{100 * one['limit']:g} %" if one["limit"] else "-",
        )
        for one in rows(PROBED)
    ]
    columns = ["probes", "every ... steps", "extra ms of a step with them", "share of the run", "limit"]
    return markdown(columns, cells, left=columns[:1])


def overhead(name: str, probe: str, form: str) -> str:
    """Return a probe's share of the run with its spread, in percent: '1.3 +- 0.5 %'."""
    one = row(name, probes=probe)
    spread = one["extra_spread_ms"] / one["step_ms"] / one["every_steps"]
    return f"{plus_minus(100 * one['overhead'], 100 * spread, form)} %"


def step(name: str) -> str:
    """Return the milliseconds of a step without probes."""
    return f"{row(name, probes=EVERY_STEP)['step_ms']:.0f}"


def measurements() -> str:
    """Return the table of what the probes cost in each measurement, the newest first."""
    cells = [
        (
            f"[{one.on}]({name}.json)",
            one.date,
            commit_of(name),
            one.computed_by,
            one.launched_ahead,
            benchmark(name)["settings"]["rounds"],
            step(name),
            overhead(name, EVERY_STEP, ".2f"),
            overhead(name, EVERY_100, ".3f"),
            overhead(name, WATCH, ".1f"),
        )
        for name, one in MEASUREMENTS.items()
    ]
    columns = [
        *("on", "date", "commit", "probes computed by", "steps launched ahead", "rounds", "step without, ms"),
        *(EVERY_STEP, EVERY_100, "watch for spikes"),
    ]
    return markdown(columns, cells, left=columns[:5])


PROBES: Parts = {
    "probes": probes,
    "measurements": measurements,
    "step": partial(step, PROBED),
    "all": partial(overhead, PROBED, EVERY_100, ".2f"),
    "rms": partial(overhead, PROBED, EVERY_STEP, ".2f"),
    "rms, every 10": lambda: f"{100 * row(PROBED, probes=EVERY_STEP)['overhead'] / 10:.2f} %",
    "watch": partial(overhead, PROBED, WATCH, ".1f"),
    "rounds": lambda: f"{benchmark(PROBED)['settings']['rounds']}",
    "all, PyTorch": partial(overhead, BEFORE, EVERY_100, ".2f"),
    "all, H100": partial(overhead, ON_THE_H100, EVERY_100, ".2f"),
    "rms, PyTorch": partial(overhead, BEFORE, EVERY_STEP, ".2f"),
    "rms, H100": partial(overhead, ON_THE_H100, EVERY_STEP, ".2f"),
}

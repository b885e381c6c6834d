"""Make the parts of the pages about what survives and what that costs: the mirror under load, the soak, checksums."""

from __future__ import annotations

import re
from functools import partial

from analysis.pages.marks import Parts, benchmark, row, rows
from mxstudy.results import markdown


def commit(name: str) -> str:
    about = benchmark(name)["provenance"]
    return f"`{about['commit']}`" + (", with uncommitted changes" if about["dirty"] else "")


def command(name: str) -> str:
    """Return the command of a benchmark, without the file that it wrote."""
    _, words = benchmark(name)["provenance"]["command"].split(" -m ", 1)
    return f"`python -m {re.sub(r' --(json|folder) [^ ]+', '', words)}`"


def cores(name: str) -> str:
    return str(benchmark(name)["settings"]["cores"])


def origin(name: str) -> Parts:
    """Return the parts that say where a benchmark's numbers come from."""
    return {"commit": partial(commit, name), "command": partial(command, name), "cores": partial(cores, name)}


# ---------------------------------------------------------------------------------------- the mirror under load

NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def moments() -> dict[str, str]:
    """Return what happened in each case, in words."""
    settings = benchmark("tracking_load")["settings"]
    gone_s = (settings["seconds"] - settings["away_s"]) / 2
    away = f"SIGKILL at {gone_s:.0f} s, started again at {gone_s + settings['away_s']:.0f} s"
    return {
        "undisturbed": "undisturbed",
        "killed": f"server: {away}",
        "database_killed": f"database: {away}",
        "read_only": f"read-only at first, server started anew at {settings['away_s']:.0f} s",
    }


def mirror() -> str:
    said = moments()
    cells = [
        (
            NAMES[one["database"]],
            said[one["case"]],
            f"{one['points']:,}",
            one["missing"],
            one["extra"],
            f"{one['arrived_s']:.1f}",
            f"{one['log_ms']:.3f}",
            f"{one['log_p99_ms']:.2f}",
            f"{one['log_max_ms']:.0f}",
            "-" if one["case"] == "undisturbed" else f"{one['ready_s']:.1f}",
            f"{one['load_average']:.1f}",
        )
        for one in rows("tracking_load")
    ]
    columns = [
        *("database", "case", "points", "missing", "extra", "all there, s after the end"),
        *("median of log(), ms", "99 %", "longest", "there again, s after the first row", "load average"),
    ]
    return markdown(columns, cells, left=["database", "case"])


def points() -> str:
    least = min(one["points"] for one in rows("tracking_load"))
    lost = sum(one["missing"] + one["extra"] for one in rows("tracking_load"))
    return f"{least:,}" if not lost else f"{least:,} but {lost:,}"


def cpu_of(database: str) -> str:
    """Return the server's CPU time per point, in ms."""
    one = row("tracking_load", database=database, case="undisturbed")
    return f"{1e3 * one['server_cpu_s'] / one['points']:.2f} ms"


MIRROR: Parts = {
    "cases": mirror,
    "points": points,
    "latest": lambda: f"{max(one['arrived_s'] for one in rows('tracking_load')):.0f} s",
    "a row": lambda: f"{max(one['log_ms'] for one in rows('tracking_load')):.2f} ms",
    "longest": lambda: f"{max(one['log_max_ms'] for one in rows('tracking_load')):.0f} ms",
    "CPU, sqlite": partial(cpu_of, "sqlite"),
    "CPU, postgresql": partial(cpu_of, "postgresql"),
    "versions": lambda: ", ".join(
        f"{name} {benchmark('tracking_load')['settings'][key]}" for key, name in {"mlflow": "MLflow", **NAMES}.items()
    ),
    **origin("tracking_load"),
}


# ----------------------------------------------------------------------------------------------------- the soak


def soaked() -> str:
    columns = list(rows("soak")[0])
    return markdown(columns, [tuple(one.values()) for one in rows("soak")], left=["kind"])


def everything(name: str, *columns: str) -> str:
    return str(sum(row(name, kind="all")[column] for column in columns))


def counts(name: str) -> Parts:
    """Return the parts that say how much was tried in a soak, what was lost, and where its numbers come from."""
    return {
        "trials": partial(everything, name, "trials"),
        "disturbances": partial(everything, name, "SIGKILL", "SIGTERM", "SIGINT", "full disk"),
        "lost": partial(everything, name, "lost"),
        **origin(name),
    }


SOAK: Parts = {
    "trials by kind": soaked,
    "disk": lambda: f"{benchmark('soak')['settings']['disk_mb']} MB",
    **counts("soak"),
    **{f"{part}, before": make for part, make in counts("soak_before").items() if part != "cores"},
}


# --------------------------------------------------------------------------------------------------- checksums

LIMIT = 0.1
LEAST_ROUNDS = 3  # fewer rounds cannot tell whether the limit is met
SIZES = ("checkpoint_1_layer", "checkpoint", "checkpoint_llama_1b")  # the last is the whole model, on another machine


def checksums() -> str:
    cells = [
        (
            f"{benchmark(name)['settings']['gib']:.1f}",
            one["what"],
            f"{one['without_s']:.2f}",
            f"{one['with_s']:.2f}",
            f"{100 * one['added']:+.0f} %",
            f"{one['without_median_s']:.2f} .. {one['without_most_s']:.2f}",
            f"{one['with_median_s']:.2f} .. {one['with_most_s']:.2f}",
        )
        for name in SIZES
        for one in rows(name)
    ]
    columns = ["GiB", "what", "without, s", "with, s", "added", "without: median .. slowest", "with: median .. slowest"]
    return markdown(columns, cells, left=["what"])


def added(name: str, what: str) -> str:
    """Return what checksums add, and whether one can tell.

    One can tell if there are enough equal rounds, and these differ by less than the limit.
    """
    one = row(name, what=what)
    count = benchmark(name)["settings"]["rounds"]
    if count < LEAST_ROUNDS:
        return f"{100 * one['added']:+.0f} % (cannot tell: {count} rounds)"
    spread = one["without_median_s"] / one["without_s"] - 1
    noisy = f" (cannot tell: without them the median is {100 * spread:.0f} % above the fastest)"
    return f"{100 * one['added']:+.0f} %" + (noisy if spread > LIMIT else "")


def added_by_medians(name: str, what: str) -> str:
    one = row(name, what=what)
    return f"{100 * (one['with_median_s'] / one['without_median_s'] - 1):+.0f} %"


def range_of(name: str, what: str, arm: str) -> str:
    """Return the seconds of the fastest and the slowest round of an arm, with or without checksums."""
    one = row(name, what=what)
    return f"{one[f'{arm}_s']:.1f} to {one[f'{arm}_most_s']:.1f}"


def settings(name: str, form: str) -> str:
    return form.format(**benchmark(name)["settings"])


def of_a_save() -> str:
    """Return the time of the checksums of a save of the whole model alone, and its share of the save without them."""
    seconds = benchmark(SIZES[2])["settings"]["checksums_of_a_save_s"]
    return f"{seconds:.2f} s, {100 * seconds / row(SIZES[2], what='save')['without_s']:.1f} %"


CHECKPOINT: Parts = {
    "seconds": checksums,
    "save": partial(added, SIZES[0], "save"),
    "load": partial(added, SIZES[0], "load from disk"),
    "from memory": partial(added, SIZES[0], "load from memory"),
    **{
        f"{said}, {size}": partial(added, name, what)
        for size, name in (("larger", SIZES[1]), ("whole", SIZES[2]))
        for said, what in (("save", "save"), ("load", "load from disk"))
    },
    **{f"saves, whole, {arm}": partial(range_of, SIZES[2], "save", arm) for arm in ("with", "without")},
    "rounds, smaller": partial(settings, SIZES[0], "{rounds}"),
    "save by medians, whole": partial(added_by_medians, SIZES[2], "save"),
    "checksums of a save": of_a_save,
    "command, smaller": partial(command, SIZES[0]),
    "size": partial(settings, SIZES[1], "{layers} layers and {vocabulary:,} words, {gib:.1f} GiB"),
    "peak": partial(settings, SIZES[1], "{peak_gib:.1f} GiB"),
    "memory of the machine": partial(settings, SIZES[1], "{memory_gib:.0f} GiB"),
    "load average": partial(settings, SIZES[1], "{load_average:.0f}"),
    "rounds": partial(settings, SIZES[1], "{rounds}"),
    "size, whole": partial(settings, SIZES[2], "{layers} layers and {vocabulary:,} words, {gib:.1f} GiB"),
    "peak, whole": partial(settings, SIZES[2], "{peak_gib:.0f} GiB"),
    "memory of its machine": partial(settings, SIZES[2], "{memory_gib:.0f} GiB"),
    "load average, whole": partial(settings, SIZES[2], "{load_average:.0f}"),
    "cores, whole": partial(cores, SIZES[2]),
    "commit, whole": partial(commit, SIZES[2]),
    "rounds, whole": partial(settings, SIZES[2], "{rounds}"),
    "command, whole": partial(command, SIZES[2]),
    **origin("checkpoint"),
}

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


OTHER_SOAKS = {"before": "soak_before", "again": "soak_again"}
SOAK: Parts = {
    "trials by kind": soaked,
    "disk": lambda: f"{benchmark('soak')['settings']['disk_mb']} MB",
    **counts("soak"),
    **{
        f"{part}, {said}": make
        for said, of in OTHER_SOAKS.items()
        for part, make in counts(of).items()
        if part != "cores"
    },
}


# --------------------------------------------------------------------------------------------------- checksums


def checksums() -> str:
    cells = [
        (
            one["what"],
            *(f"{one[f'{arm}{which}_s']:.2f}" for arm in ("without", "with") for which in ("", "_median", "_most")),
            f"{100 * one['added']:+.1f} %",
        )
        for one in rows("checkpoint")
    ]
    spread = "fastest, s", "median", "slowest"
    columns = ["what", *(f"{arm}: {word}" for arm in ("without", "with") for word in spread), "added"]
    return markdown(columns, cells, left=["what"])


def added(what: str, of: str = "_s") -> str:
    """Return what checksums add to the time of a save or load: '+1.6 %'. `of` is _s, the fastest, or _median_s."""
    one = row("checkpoint", what=what)
    return f"{100 * (one[f'with{of}'] / one[f'without{of}'] - 1):+.1f} %"


def of_a_save() -> str:
    """Return the time of the checksums of a save alone, and its share of the save without them."""
    seconds = benchmark("checkpoint")["settings"]["checksums_of_a_save_s"]
    return f"{seconds:.2f} s, {100 * seconds / row('checkpoint', what='save')['without_s']:.1f} %"


def settings(form: str) -> str:
    return form.format(**benchmark("checkpoint")["settings"])


CHECKPOINT: Parts = {
    "seconds": checksums,
    "save": partial(added, "save"),
    "save by medians": partial(added, "save", "_median_s"),
    "slowest save": lambda: f"{row('checkpoint', what='save')['with_most_s']:.1f}",
    "load": partial(added, "load from disk"),
    "load from memory": partial(added, "load from memory"),
    "checksums of a save": of_a_save,
    "size": partial(settings, "{layers} layers and {vocabulary:,} words, {gib:.1f} GiB"),
    "peak": partial(settings, "{peak_gib:.0f} GiB"),
    "memory of the machine": partial(settings, "{memory_gib:.0f} GiB"),
    "load average": partial(settings, "{load_average:.0f}"),
    "rounds": partial(settings, "{rounds}"),
    **origin("checkpoint"),
}

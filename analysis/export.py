"""Export run folders to the compact Parquet tables of results/.

There is one row per run, step, validation, spike, measurement of a probe, and question of an evaluation. The tables of
studies are exported too. Each replica of a stack counts as a run. Curves and large measurements are thinned by RULES,
which keep what the pages and figures of results/ read. --every-steps thins the curves further, and --without leaves
out columns of measurements. Tables of runs, with events, outcomes and final values, keep everything but the hundreds
of fields of precisions that a run lists. Tables
that were exported before can be exported again, alone or with the runs that came later.

python -m analysis.export --runs runs/mxnorm_pretrain --name mxnorm_pretrain [--to results]
python -m analysis.export --runs results/lr_sensitivity_paired runs/lr_sensitivity_paired --name lr_sensitivity_paired
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from analysis.command import Parser, command
from mxstudy import results

CURVES = ("metrics", "fork_metrics")
ByKind: TypeAlias = dict[str, tuple[pd.DataFrame, dict[str, Any]]]  # rows and provenance of each kind of table
RUN = ("fingerprint", "replica", "fork")  # columns that tell one curve from another


@dataclass(frozen=True)
class Thinning:
    """Say how a table of one kind is thinned.

    `without` and `coarse` are patterns: columns whose names contain the first are left out, and of those that contain
    the second 12 bits of a number are kept, with which they take half the space. `single` keeps real numbers in single
    precision. `last` keeps only each run's last measurement.
    """

    without: str | None = None
    single: bool = False
    coarse: str | None = None
    last: bool = False


OF_OPERAND = r"/(forward|dgrad|wgrad)_\w+/ratio$"
RULES = {
    "runs": Thinning(without=r"^config\.precisions\."),
    "metrics": Thinning(without="^time_s$", single=True, coarse="^(grad_norm|tokens_per_s|mfu)$"),
    "fork_metrics": Thinning(single=True, coarse="^grad_norm$"),
    "samples": Thinning(without="^(contexts|continuations|nats|alone)$", single=True),  # the first two are not ours
    "saturation": Thinning("(_gaussian|/max_fraction|/scale_exponent_(mean|min|max))$", single=True, coarse="/"),
    "gradient_bias": Thinning(rf"^layers\.(?!.*{OF_OPERAND}).*/(?!cosine$)\w+$", single=True, coarse="^model/"),
    "coupled_gradient_bias": Thinning(r"^layers\.", single=True, coarse="^model/"),
    "sharpness": Thinning(single=True, coarse="/(eigenvalue|residual)$"),  # stabilities are near 1
    "last_bin": Thinning(without="/(literal_fraction|rceil/.*|floor/max_fraction|std|min|max)$", single=True),
    "activation_histograms": Thinning(last=True),
    "outlier_features": Thinning(without="/(feature|sharing_tokens|rms)$"),
}


def pattern(word: str) -> re.Pattern[str]:
    """Return an option's regular expression. Raises argparse's error if it is none."""
    try:
        return re.compile(word)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{word} is not a regular expression: {error}") from None


def positive(word: str) -> int:
    """Return an option's number. Raises argparse's error if it is not a whole number above 0."""
    if not word.isdigit() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number above 0")
    return int(word)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    what = "run folders, or folders of them; or prefixes of tables in results/"
    parser.add_argument("--runs", nargs="+", required=True, help=what)
    parser.add_argument("--name", required=True, help="the tables are called NAME_runs.parquet and so on")
    parser.add_argument("--to", type=Path, default=Path("results"))
    parser.add_argument("--every-steps", type=positive, default=1, help="keep every N-th step of curves, and the last")
    leaves = r"leave out columns of measurements that match this regular expression, such as '^layers\.'"
    parser.add_argument("--without", type=pattern, help=leaves)
    given = parser.parse_args(arguments)
    tables = list(tables_of(given.runs))
    given.to.mkdir(parents=True, exist_ok=True)
    for kind, whole, provenance in tables:
        if len(whole):
            path, frame = given.to / f"{given.name}_{kind}.parquet", thinned(whole, kind, given.every_steps)
            if given.without and kind not in results.KINDS:
                frame = frame.drop(columns=[name for name in frame if given.without.search(name)])
            results.write_table(frame, path, provenance)
            print(f"{path}: {len(frame):,} rows, {path.stat().st_size / 1e6:.2f} MB")


def tables_of(paths: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]:
    """Yield the kind, rows and provenance of each table of these folders and prefixes, tables of a prefix first.

    Raises ConfigError if a run is in several of them.
    """
    exported = [path for path in paths if of_prefix(Path(path))]
    folders = [path for path in paths if path not in exported]
    sources = [read_prefix(path) for path in exported] + ([read_folders(folders)] if folders else [])
    for first, second in combinations(sources, 2):
        if twice := sorted({*first["runs"][0]["fingerprint"]} & {*second["runs"][0]["fingerprint"]}):
            raise results.ConfigError(f"--runs: {len(twice)} runs are given twice, such as {twice[0]}; give each once")
    for kind in dict.fromkeys(kind for tables in sources for kind in tables):
        found = [tables[kind] for tables in sources if kind in tables]
        filled = [rows for rows, _ in found if len(rows)]
        yield kind, pd.concat(filled, ignore_index=True) if filled else found[0][0], found[0][1]


def read_prefix(path: str) -> ByKind:
    return {kind: results.read_table(table) for kind, table in of_prefix(Path(path)).items()}


def read_folders(paths: Sequence[str]) -> ByKind:
    folders = results.folders_of(paths)
    provenance = folders[0].provenance()
    left = [name for name in results.table_names(folders) if not name.startswith(results.SAMPLES)]
    probes = sorted({*results.PROBES, *results.STACK_PROBES})
    loaded = {kind: load(folders) for kind, load in results.KINDS.items()}
    loaded |= {probe: results.load_probe(folders, probe) for probe in probes}
    loaded |= {name: results.load_table(folders, name) for name in left}
    return {kind: (rows, provenance) for kind, rows in loaded.items()}


def of_prefix(prefix: Path) -> dict[str, Path]:
    """Return the tables of a prefix by kind.

    Tables of a longer prefix do not belong to it: decisive_2 is not part of decisive.
    """
    names = [path.name.removesuffix("_runs.parquet") for path in prefix.parent.glob("*_runs.parquet")]
    longer = tuple(f"{name}_" for name in names if name.startswith(f"{prefix.name}_"))
    found = sorted(prefix.parent.glob(f"{prefix.name}_*.parquet"))
    return {
        path.stem.removeprefix(f"{prefix.name}_"): path
        for path in found
        if prefix.name in names and not path.name.startswith(longer)
    }


def thinned(frame: pd.DataFrame, kind: str, every_steps: int) -> pd.DataFrame:
    """Return what the kind's rule keeps of a table.

    A curve keeps one of every `every_steps` steps, and the last. Those of a fork are counted from its first, so that
    curves of forks have the same steps since the fork. The column folder keeps only EXPERIMENT/FINGERPRINT.
    """
    rule = RULES.get(kind, Thinning())
    if "folder" in frame:
        frame = frame.assign(folder=["/".join(Path(folder).parts[-2:]) for folder in frame["folder"]])
    if rule.without:
        frame = frame.drop(columns=frame.filter(regex=rule.without).columns)
    if rule.last or (kind in CURVES and every_steps > 1):
        steps = frame.groupby([key for key in RUN if key in frame], dropna=False)["step"]
        kept = frame["step"] == steps.transform("max")
        since = frame["step"] - (steps.transform("min") if kind == "fork_metrics" else 0)
        frame = frame[kept if rule.last else kept | (since % every_steps == 0)]
    if rule.coarse:
        rounded = frame.filter(regex=rule.coarse).select_dtypes(np.floating).apply(with_12_bits)
        frame = frame.assign(**dict(rounded.items()))
    if rule.single:
        frame = frame.astype(dict.fromkeys(frame.select_dtypes("float64").columns, "float32"))
    return frame.reset_index(drop=True)


def with_12_bits(numbers: pd.Series) -> pd.Series:
    """Return the nearest numbers whose mantissa has 12 bits: at most 2^-12 away, relative."""
    mantissas, exponents = np.frexp(numbers.astype("float64"))
    return pd.Series(np.ldexp(np.round(mantissas * 2**12), exponents - 12), numbers.index)


if __name__ == "__main__":
    main()

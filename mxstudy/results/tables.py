"""Read and write frames in files that record their provenance: Parquet, and the JSON of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mxstudy.reader import ConfigError, one_line, require
from mxstudy.small_files import read_json
from mxstudy.whole_files import replacing

PROVENANCE = b"mxstudy.provenance"
MIXED = b"mxstudy.mixed"  # columns with words among numbers are JSON, because a column of Parquet has one type
CONFIG = "config"  # columns `config.<key>` are one column of JSON: several hundred columns cost more than their values
ONE_CONFIG = b"mxstudy.config"  # in the metadata of a table with this column
VALUES, NAMES = "values", "names"  # a probe's columns, such as `layers.0.w2/forward_x/sqnr_db`, are one list in a row
ONE_LIST = b"mxstudy.values"  # in the metadata of a table with these two columns
LONG = 1000  # rows; a table with more keeps a probe's columns, which compress better than lists do
OF_REPLICAS = ("config.seed", "config.lr")  # in which the replicas of a stack differ
COPY_IT = "copy it again, or make it again from the runs"


def write_table(frame: pd.DataFrame, path: Path, provenance: dict[str, Any]) -> None:
    """Write the frame atomically as compressed Parquet, with its provenance, without `code_files`, in the metadata.

    Columns `config.<key>` become one column `config` (`with_one_config`), a probe's numbers one column of lists
    (`with_one_list`).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = json.dumps({key: value for key, value in provenance.items() if key != "code_files"}).encode()
    one_config = with_one_config(frame)
    narrow = with_one_list(one_config)
    has_list = narrow is not one_config
    mixed = mixed_columns(narrow)
    table = pa.Table.from_pandas(
        narrow.assign(**{name: narrow[name].map(json.dumps) for name in mixed}), preserve_index=False
    )
    metadata = {PROVENANCE: about} | ({MIXED: json.dumps(mixed).encode()} if mixed else {})
    metadata |= {ONE_CONFIG: b"1"} if one_config is not frame else {}
    metadata |= {ONE_LIST: b"1"} if has_list else {}
    table = table.replace_schema_metadata(None)  # pandas' own is often larger than the rows
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    others = [name for name in table.column_names if name not in floats and name != VALUES]
    floats += [f"{VALUES}.list.element"] if has_list else []
    smaller = {"use_dictionary": others, "use_byte_stream_split": floats} if floats else {}  # saves a quarter to a half
    how = {
        "compression": "brotli",  # an eighth smaller than zstd; 140,000 rows are written in 1 s
        "compression_level": 10,
        "write_statistics": False,
        "store_schema": False,  # Arrow's schema: an eighth of a file
    }
    with replacing(path) as temporary, pq.ParquetWriter(temporary, table.schema, **how, **smaller) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return a table that `write_table` wrote, and its provenance. Raises ConfigError for one that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        frame, mixed = table.to_pandas(), json.loads(metadata.get(MIXED, b"[]"))
        frame = frame.assign(**{name: frame[name].map(json.loads) for name in mixed})
        frame = with_values_apart(frame) if ONE_LIST in metadata else frame
        return with_config_apart(frame) if ONE_CONFIG in metadata else frame, json.loads(metadata[PROVENANCE])
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: cannot be read as a table of runs ({one_line(error)}); {COPY_IT}") from error


def with_one_config(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with one column `config`, each row's columns `config.<key>` as JSON, in the place of the first.

    A replica's own columns, in which it differs from the rest of its stack, stay as they are. Raises ConfigError if
    there is another column `config`.
    """
    own = OF_REPLICAS if "replica" in frame else ()
    keys = [name for name in frame if str(name).startswith(f"{CONFIG}.") and name not in own]
    if not keys or frame.empty:
        return frame
    require(CONFIG not in frame, f"a table cannot have a column {CONFIG} beside columns such as {keys[0]}; rename it")
    configs = frame[keys].astype(object).where(frame[keys].notna(), None).to_dict("records")
    one = pd.Series([json.dumps(config) for config in configs], frame.index, name=CONFIG)
    at, others = list(frame).index(keys[0]), frame.drop(columns=keys)
    return pd.concat([others.iloc[:, :at], one, others.iloc[:, at:]], axis="columns")


def with_config_apart(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of `with_one_config` with the columns `config.<key>` again, all in one place."""
    at, configs = list(frame).index(CONFIG), pd.DataFrame(frame[CONFIG].map(json.loads).tolist(), index=frame.index)
    return pd.concat([frame.iloc[:, :at], configs, frame.iloc[:, at + 1 :]], axis="columns")


def with_one_list(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with a list of each row's values of a probe, float32, in the place of their columns.

    The names of these columns are a list in the first row of another column. A frame without rows, with more than LONG
    of them, or with fewer than two such columns is returned as it is. Raises ConfigError if there already is a column
    of either name.
    """
    names = [name for name, dtype in frame.dtypes.items() if "/" in str(name) and dtype == "float32"]
    if len(names) < 2 or frame.empty or len(frame) > LONG:
        return frame
    taken = ", ".join(sorted({VALUES, NAMES} & {*frame}))
    require(not taken, f"a table cannot have a column {taken} beside columns such as {names[0]}; rename it")
    one = pd.DataFrame({NAMES: [names] + [None] * (len(frame) - 1), VALUES: [*frame[names].to_numpy()]}, frame.index)
    at, others = list(frame).index(names[0]), frame.drop(columns=names)
    return pd.concat([others.iloc[:, :at], one, others.iloc[:, at:]], axis="columns")


def with_values_apart(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of `with_one_list` with a probe's columns again, all in one place."""
    at, others = list(frame).index(NAMES), frame.drop(columns=[NAMES, VALUES])
    values = pd.DataFrame(np.stack(frame[VALUES]), index=frame.index, columns=[*frame[NAMES].iloc[0]])
    return pd.concat([others.iloc[:, :at], values, others.iloc[:, at:]], axis="columns")


def mixed_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns with words in some rows and numbers in others, such as a number of blocks or `tail`."""
    objects = frame.loc[:, frame.dtypes.eq(object)]
    return [name for name in objects if objects[name].dropna().map(lambda value: isinstance(value, str)).nunique() > 1]


def read_benchmark(path: Path) -> pd.DataFrame:
    """Return the rows of a benchmark's JSON, with its settings as columns `setting.NAME`.

    Like a run, they have a label (the device) and a fingerprint (the commit).
    """
    content = read_json(path, COPY_IT)
    about, settings = content["provenance"], content["settings"]
    device = settings.get("device")
    label = about["gpu"].replace(" ", "_") if about["gpu"] and device != "cpu" else "CPU"
    fingerprint = about["commit"] or "unknown"
    of_all = {f"setting.{name}": value for name, value in settings.items() if not isinstance(value, (dict, list))}
    return pd.DataFrame(content["rows"]).assign(label=label, fingerprint=fingerprint, **of_all)

"""Read and write frames in files that record their provenance: Parquet, and the JSON of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from mxstudy.reader import ConfigError, one_line
from mxstudy.small_files import read_json
from mxstudy.whole_files import replacing

PROVENANCE = b"mxstudy.provenance"
COPY_IT = "copy it again, or make it again from the runs"


def write_table(frame: pd.DataFrame, path: Path, provenance: dict[str, Any]) -> None:
    """Write the frame atomically as compressed Parquet, with its provenance, less that of files, in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = json.dumps({key: value for key, value in provenance.items() if key != "code_files"}).encode()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({PROVENANCE: about})  # without that of pandas, often larger than the rows
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    others = [name for name in table.column_names if name not in floats]
    smaller = {"use_dictionary": others, "use_byte_stream_split": floats} if floats else {}  # saves a quarter to a half
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_statistics=False, **smaller)


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return a table that `write_table` wrote, and its provenance. Raises ConfigError for one that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        return table.to_pandas(), json.loads((table.schema.metadata or {})[PROVENANCE])
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: cannot be read as a table of runs ({one_line(error)}); {COPY_IT}") from error


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

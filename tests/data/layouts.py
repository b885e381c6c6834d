"""Make small data sets in the layouts of three data sets of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import yaml
from pyarrow import parquet

from mxstudy import config
from mxstudy.config.conf_folders import CONF
from mxstudy.reader import read

FINEWEB_EDU = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/*/*}
- config_name: sample-10BT
  data_files:
  - {split: train, path: sample/10BT/*}
---
"""


def lines(path: Path, texts: list[str], field: str = "text") -> None:
    """Write JSON lines, compressed as the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.output_stream(str(path), compression="detect" if path.suffix != ".zst" else "zstd") as file:
        file.write("".join(json.dumps({field: text, "meta": {"n": 1}}) + "\n" for text in texts).encode())


def table(path: Path, texts: list[str], field: str = "text", rows: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, row_group_size=rows)


def slimpajama(root: Path) -> None:
    for split in ("train", "validation", "test"):
        for chunk in (1, 2):
            for number in (0, 1, 10):
                texts = [f"{split} {chunk} {number} {row}" for row in range(5)]
                lines(root / split / f"chunk{chunk}" / f"example_{split}_{number}.jsonl.zst", texts)


def fineweb_edu(root: Path) -> None:
    for name in ("data/CC-MAIN-2013-20/train-00000-of-00002", "sample/10BT/000_00000", "sample/10BT/001_00000"):
        table(root / f"{name}.parquet", [f"{name} {row}" for row in range(5)])
    (root / "README.md").write_text(FINEWEB_EDU)


def starcoder(root: Path) -> None:
    for language in ("c", "python"):
        for number in range(2):
            texts = [f"{language} {number} {row}" for row in range(5)]
            table(root / language / f"train-0000{number}-of-00002.parquet", texts, "content")


EXPECTED = {
    "slimpajama": [f"train {chunk} {number} {row}" for chunk in (1, 2) for number in (0, 1, 10) for row in range(5)],
    "fineweb_edu": [f"sample/10BT/00{number}_00000 {row}" for number in range(2) for row in range(5)],
    "starcoder": [f"python {number} {row}" for number in range(2) for row in range(5)],
}
LAYOUTS = {"slimpajama": slimpajama, "fineweb_edu": fineweb_edu, "starcoder": starcoder}


def choice(name: str, **fields) -> config.HuggingFace:
    """Return conf/data/NAME.yaml with some fields changed."""
    values = yaml.safe_load((CONF / "data" / f"{name}.yaml").read_text())
    del values["defaults"]
    return read(config.HuggingFace, values | fields)

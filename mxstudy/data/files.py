"""Read documents from text, JSON lines and Parquet files, starting at any row; errors name file and row.

All readers stream: at most one document, or one row group of a Parquet file, is held in memory.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
from pyarrow import parquet

from mxstudy.reader import ConfigError, require, suggest

ON_THE_HUB = "hf://"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "parquet"}
ROWS_AT_ONCE = 1024  # rows of a Parquet file per batch


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its suffix, "jsonl" or "parquet", or None for any other suffix."""
    return next((kind for suffix, kind in KINDS.items() if name.endswith(suffix)), None)


def documents_of(path: str, kind: str, text_field: str, skip: int = 0) -> Iterator[str]:
    """Yield the documents of a local file or a file on the hub, from row `skip` on, empty ones too.

    Raises ConfigError, with file and row, for a document that cannot be read.
    """
    try:
        with opened(path) as file:
            yield from READERS[kind](file, path, text_field, skip)
    except (OSError, pyarrow.ArrowException) as error:
        names = {"parquet": "Parquet", "jsonl": "JSON lines", "text": "text"}
        raise ConfigError(f"data: {path} cannot be read as {names[kind]}: {error}") from error


def opened(path: str) -> BinaryIO:
    if not path.startswith(ON_THE_HUB):
        return open(path, "rb")
    from huggingface_hub import HfFileSystem  # the import takes a second

    return HfFileSystem().open(path, "rb")


def read_text(file: BinaryIO, where: str, text_field: str, skip: int) -> Iterator[str]:
    if not skip:
        yield decode(file.read(), where)


def read_jsonl(file: BinaryIO, where: str, text_field: str, skip: int) -> Iterator[str]:
    """Yield the text of each line that is not blank, from the `skip`-th such line on."""
    lines = decompressed(file, where)
    offset, rows = 0, 0
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            rows += 1
            if rows > skip:
                at = f"{where}, line {number}"
                yield text_in(parse(decode(line, where, offset), at), text_field, at)
        offset += len(line)


def decompressed(file: BinaryIO, where: str) -> Iterable[bytes]:
    """Return the file's lines, decompressed according to the suffix of `where`."""
    compression = COMPRESSIONS.get(Path(where).suffix)
    return io.BufferedReader(pyarrow.CompressedInputStream(file, compression)) if compression else file


def read_parquet(file: BinaryIO, where: str, text_field: str, skip: int) -> Iterator[str]:
    """Yield the text of each row from row `skip` on; row groups that lie before it are not read.

    No thread of Arrow may touch `file`: where it is a Python object, as files on the hub are, a thread that releases it
    while the interpreter shuts down aborts the process.
    """
    table = parquet.ParquetFile(file, pre_buffer=False)
    require_column(table.schema_arrow.names, text_field, where)
    number = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if number + rows <= skip:
            number += rows
            continue
        batches = table.iter_batches(ROWS_AT_ONCE, [group], [text_field], use_threads=False)
        for text in itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches):
            number += 1
            if number > skip:
                yield checked(text, text_field, f"{where}, row {number}")


READERS: dict[str, Callable[[BinaryIO, str, str, int], Iterator[str]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}


def decode(content: bytes, where: str, offset: int = 0) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {where} is not UTF-8: {error.reason} at byte {offset + error.start}") from error


def parse(line: str, where: str, key: str = "data") -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for integers too long for Python, and objects nested too deep
        raise ConfigError(f"{key}: {where}: not valid JSON: {error}") from error
    require(isinstance(row, dict), f"{key}: {where}: must be a JSON object, not {type(row).__name__}")
    return row


def text_in(row: Mapping[str, Any], text_field: str, where: str) -> str:
    """Return the text of a row; raise ConfigError if it has none, or one that cannot be encoded as UTF-8."""
    require_column(row, text_field, where)
    return checked(row[text_field], text_field, where)


def checked(text: Any, text_field: str, where: str) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"data.text_field: {where}: {text_field!r} is {text!r}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"data.text_field: {where}: not valid Unicode: {error.reason}") from error
    return text


def require_column(names: Iterable[str], text_field: str, where: object) -> None:
    if text_field not in names:
        raise ConfigError(f"data.text_field: {where} has no column {text_field!r}; {suggest(text_field, names)}")

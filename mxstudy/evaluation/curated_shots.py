"""List the rows of the training splits that are OLMES' curated shots, in its order (OLMES, arXiv 2406.08446).

If a data set numbers its rows, the list has these numbers. Otherwise it has a digest of each row's text. The rows
themselves are read from the data set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mxstudy.data.evaluation_sets import DataSetRows
from mxstudy.reader import ConfigError, require


class Curated(NamedTuple):
    """The shots of a task. `columns`: the columns that identify a row. `keys`: their values, joined by |, of five rows.

    `digests`: whether the keys are the first 16 digits of the sha256 of that text.
    """

    columns: tuple[str, ...]
    keys: tuple[str, ...]
    digests: bool = False

    def key_of(self, row: Mapping[str, Any]) -> str:
        text = "|".join(str(row[column]).strip() for column in self.columns)
        return hashlib.sha256(text.encode()).hexdigest()[:16] if self.digests else text


CURATED = {
    "arc_challenge": Curated(
        ("id",), ("Mercury_SC_415702", "MCAS_2009_5_6516", "Mercury_7233695", "Mercury_7041615", "MCAS_1998_4_3")
    ),
    "arc_easy": Curated(
        ("id",),
        ("MCAS_2007_8_5189", "Mercury_SC_401169", "MCAS_2004_8_27", "NYSEDREGENTS_2006_8_10", "Mercury_7013388"),
    ),
    "boolq": Curated(("idx",), ("0", "1", "7", "11", "3")),
    "csqa": Curated(
        ("id",),
        (
            "61fe6e879ff18686d7552425a36344c8",
            "02e821a3e53cb320790950aab4489e85",
            "23505889b94e880c3e89cff4ba119860",
            "a76403b4921a9281b6ee2a7241a5ec9f",
            "6dc921840aa1e5dda3333b79007f630b",
        ),
    ),
    "hellaswag": Curated(
        ("source_id", "ind"),
        (
            "wikihow~19|12",
            "wikihow~66|39",
            "activitynet~v_-2dxp-mv2zo|9",
            "activitynet~v_-Xl95IW5H_s|47",
            "wikihow~62|38",
        ),
    ),
    "openbookqa": Curated(("id",), ("7-584", "7-870", "9-732", "9-782", "8-72")),
    "piqa": Curated(
        ("goal", "sol1"),
        ("489ef88f16d1ffdf", "013dc3e26b668ffb", "75c3b9022ddf261e", "6b2ef11f5c70e2f5", "e40bf3ac995bc4df"),
        digests=True,
    ),
    "socialiqa": Curated(
        ("context", "question", "answerA"),
        ("22af6044bb9e75be", "b24c4983c6f612cd", "becf46daa9cc1e5f", "e92e818442f0b5a0", "1f1bf0f69de6371e"),
        digests=True,
    ),
    "winogrande": Curated(
        ("sentence",),
        ("6d85bb83e1288b93", "792f04408f2a223a", "b67610eeafc23565", "93c29007485d3d2d", "188699edb163b757"),
        digests=True,
    ),
}


def find_curated(name: str, rows: DataSetRows, wanted: int, place: str) -> list[int]:
    """Return the numbers of the rows that are the first `wanted` curated shots, in OLMES' order.

    `place`: where the rows are. Raises ConfigError if OLMES has too few for the task, or if one is not there.
    """
    require(name in CURATED, f"evaluation.curated_shots: OLMES has none for {name}; leave the task out")
    known = CURATED[name]
    require(wanted <= len(known.keys), f"evaluation.curated_shots: {name} has {len(known.keys)}, not {wanted}")
    try:
        numbers = {known.key_of(row): number for number, row in reversed(list(enumerate(rows)))}
    except KeyError as column:
        raise ConfigError(f"{place}: its rows have no {column}, by which OLMES' shots are found") from None
    missing = [key for key in known.keys[:wanted] if key not in numbers]
    which = f"{'|'.join(known.columns)}{' digest' * known.digests}"
    require(not missing, f"{place}: has no row with the {which} {', '.join(missing)}, a shot of OLMES for {name}")
    return [numbers[key] for key in known.keys[:wanted]]

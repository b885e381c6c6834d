"""The mean of a few numbers with its interval, and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of `count` finite numbers among `of`.

    `half_width`: that of its 95 % interval by Student, NaN for fewer than two.
    """

    value: float
    half_width: float
    count: int
    of: int

    def text(self, form: str) -> str:
        """Return '5.0123 ± 0.0045', without an interval for a single number, '-' for none."""
        if not self.count:
            return "-"
        spread = "" if math.isnan(self.half_width) else f" ± {self.half_width:{form.strip('+')}}"
        return f"{self.value:{form}}{spread}"

    def counted(self, form: str) -> str:
        """Return '5.0123 ± 0.0045 (4)', or '(4 of 6)' where some numbers are not finite."""
        some = f"{self.count}" if self.count == self.of else f"{self.count} of {self.of}"
        return f"{self.text(form)} ({some})" if self.of else "-"


def estimate(values: pd.Series) -> Estimate:
    """Return the mean of the finite values with its interval."""
    finite = values[np.isfinite(values.astype(float))].astype(float)
    count, of = len(finite), len(values)
    if count < 2:
        return Estimate(float(finite.mean()) if count else math.nan, math.nan, count, of)
    from scipy import stats  # takes a second to import

    half_width = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * finite.std(ddof=1) / math.sqrt(count)
    return Estimate(float(finite.mean()), float(half_width), count, of)

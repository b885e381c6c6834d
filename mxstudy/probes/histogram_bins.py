"""The bins of the activation histograms; does not import torch, because figures use it too."""

from __future__ import annotations

import numpy as np

SMALLEST_EXPONENT, LARGEST_EXPONENT, BINS_PER_OCTAVE = -16, 12, 4
FINITE_EDGES = (LARGEST_EXPONENT - SMALLEST_EXPONENT) * BINS_PER_OCTAVE + 1  # on either side of 0


def bin_edges() -> np.ndarray:
    """Return the edges of the histograms, ascending and symmetric about 0.

    Their magnitudes are the powers of 2^(1/4) from 2^-16 to 2^12, and infinity. The middle bin contains all magnitudes
    below 2^-16.
    """
    exponents = np.arange(SMALLEST_EXPONENT * BINS_PER_OCTAVE, LARGEST_EXPONENT * BINS_PER_OCTAVE + 1)
    magnitudes = np.append(2.0 ** (exponents / BINS_PER_OCTAVE), np.inf)
    return np.concatenate((-magnitudes[::-1], magnitudes))

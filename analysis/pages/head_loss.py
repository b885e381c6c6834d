"""Make the parts of the page about the head and its loss, from the JSON of benchmarks.head_loss."""

from __future__ import annotations

from functools import partial

from analysis.pages.marks import Parts, frame, row, rows
from mxstudy.results import markdown, plus_minus

ARMS = {
    "whole, compiled": "whole logits, compiled",
    "whole, eager": "whole logits, eager",
    "liger": "Liger, its own chunks",
    "liger, 8 times as many": "Liger, chunks of 8 times as many tokens",
}
USUAL = "chunks of 2^29, usual"
VOCABULARIES = (128_256, 32_000)


def arms() -> str:
    cells = [
        (
            f"{one['vocabulary']:,}",
            ARMS.get(one["arm"], f"ours, {one['arm']}"),
            plus_minus(one["ms"], one["spread_ms"], ".1f"),
            f"{one['over_whole']:.2f}",
            f"{one['over_floor']:.2f}",
            f"{one['peak_gib']:.1f}",
            one["rounds"],
        )
        for one in rows("head_loss")
    ]
    columns = ["vocabulary", "head and loss", "ms, +- half the quartiles' range", "over whole logits, compiled"]
    columns += ["over the floor", "peak memory, GiB", "rounds"]
    return markdown(columns, cells, left=columns[1:2])


def of_arm(vocabulary: int, arm: str, column: str, form: str) -> str:
    return f"{row('head_loss', vocabulary=vocabulary, arm=arm)[column]:{form}}"


def over_eager(vocabulary: int) -> str:
    ours, whole = (row("head_loss", vocabulary=vocabulary, arm=arm)["ms"] for arm in (USUAL, "whole, eager"))
    return f"{ours / whole:.2f}"


def liger_over_ours(vocabulary: int, arm: str) -> str:
    own, peer = (row("head_loss", vocabulary=vocabulary, arm=one)["ms"] for one in (USUAL, arm))
    return f"{peer / own:.2f}"


def largest_error() -> str:
    """Return the largest relative difference of a loss or gradient to that of whole logits in eager mode."""
    return f"{frame('head_loss')[['loss_error', 'dx_error', 'dw_error']].to_numpy().max():.4f}"


def loss_error() -> str:
    """Return the largest relative difference of the loss of our chunks to that of whole logits in eager mode."""
    return f"{max(one['loss_error'] for one in rows('head_loss') if one['arm'].startswith('chunks')):.1g}"


HEAD_LOSS: Parts = {
    "head and loss": arms,
    **{
        f"chunks over whole logits, {vocabulary:,}": partial(of_arm, vocabulary, USUAL, "over_whole", ".2f")
        for vocabulary in VOCABULARIES
    },
    **{f"chunks over eager, {vocabulary:,}": partial(over_eager, vocabulary) for vocabulary in VOCABULARIES},
    **{
        f"memory of {said}": partial(of_arm, VOCABULARIES[0], arm, "peak_gib", ".1f")
        for said, arm in (("chunks", USUAL), ("whole logits, compiled", "whole, compiled"), ("eager", "whole, eager"))
    },
    **{
        f"{said} over ours, {vocabulary:,}": partial(liger_over_ours, vocabulary, arm)
        for said, arm in (("Liger", "liger"), ("Liger with our chunks", "liger, 8 times as many"))
        for vocabulary in VOCABULARIES
    },
    "largest error": largest_error,
    "loss error": loss_error,
}

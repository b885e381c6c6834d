"""A plan's patterns, and the blocks that are skipped, take linears; those that take none are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from each import each
from precision_applied import MODEL, applied

from mxstudy import config
from mxstudy.model.patterns import match_plan
from mxstudy.reader import ConfigError


def test_the_last_pattern_that_matches_wins():
    names = ["layers.0.wo", "layers.1.wo", "layers.1.up"]
    want = dict(zip(names, ("mxfp8", "mxfp4", "bf16"), strict=True))
    assert match_plan({"layers.0.*": "mxfp8", "layers.1.*": "bf16", "*.1.wo": "mxfp4"}, names, "fp32") == want


@each(
    ("plan", "settings", "message"),
    [
        (
            {"layers.0.*": "mxfp8", "layers.*": "bf16"},
            {},
            r"schedule: pattern 'layers\.0\.\*' has no effect, because later ones match all of its linears: 'layers",
        ),
        (
            {"layers.*": "mxfp8", "layers.0.*": "mxfp4", "layers.1.*": "bf16"},
            {},
            r"schedule: pattern 'layers\.\*' has no effect, because .*: 'layers\.0\.\*', 'layers\.1\.\*'; leave",
        ),
        (
            {"layers.*": "mxfp8", "output": "bf16"},
            {"head": True},
            r"head: true gives 'output' the recipe of 'layers\.\*', and the plan from step 0 has a pattern",
        ),
        (
            {"layers.*": "bf16", "layers.0.*": "mxfp8"},
            {"head": True},
            r"head: true is set, and 'layers\.\*' is not quantised; write precision\.head=false, or give that",
        ),
        (
            {"layers.0.*": "mxfp8"},
            {"skip_blocks": "tail"},
            r"skip_blocks: tail has no effect, because no plan quantises a linear of these blocks; write",
        ),
        (
            {"layers.0.*": "mxfp8"},
            {"skip_blocks": (1, 0)},
            r"skip_blocks: \[1,0\] takes all linears from the plan's pattern 'layers\.0\.\*'; leave that out",
        ),
        (
            {"layers.*": "mxfp8", "layers.1.*": "mxfp4"},
            {"skip_blocks": (0, 1)},
            r"skip_blocks: \[0,1\] takes all linears from the plan's pattern 'layers\.1\.\*'; leave that out",
        ),
    ],
)
def test_what_takes_no_linear_is_refused(plan, settings, message):
    with pytest.raises(ConfigError, match=rf"^precision\.{message}"):
        applied(plan, **settings)


def test_what_takes_linears_in_one_row_of_the_schedule_or_in_other_arms_is_accepted():
    ends = tuple(config.PrecisionRow(from_step=i, plan={"layers.*": row}) for i, row in enumerate(("bf16", "mxfp8")))
    for step in (0, 1):
        applied(ends, model=replace(MODEL, num_layers=3, vocab_size=64), step=step, skip_blocks=1, head=True)
    for plan in ({"layers.*": "bf16"}, {"layers.0.*": "bf16", "layers.1.*": "bf16"}):
        applied(plan, skip_blocks=(1, 0))


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"'layers.0.atention.wo' matches no linear; did you mean 'layers.0.attention"
    ):
        applied({"layers.0.atention.wo": "mxfp8"})


def test_a_misspelt_pattern_is_refused_with_the_nearest_pattern():
    with pytest.raises(ConfigError, match=r"'layres.\*' matches no linear; did you mean 'layers.\*'"):
        applied({"layres.*": "mxfp8"})

"""Arms with recipes of conf/precision are named by their file, and by the fields that an override changes."""

from __future__ import annotations

import pytest
from composing import compose_job
from each import each

from mxstudy.config import read_run
from mxstudy.config.deciding import Value
from mxstudy.tracking.arms import Described, arms_of, describe
from mxstudy.tracking.recipe_changes import changes

NVFP4 = "precision.recipes.nvfp4"


def planned(*words: str) -> Described:
    job = compose_job("+experiment=quickstart", *words)
    return describe(read_run(job.values), job.choices)


@pytest.mark.integration
def test_an_arm_is_named_by_its_file_and_what_departs_from_it() -> None:
    names = {
        "nvfp4": ["precision=nvfp4"],
        "mxfp8": ["precision=mxfp8"],
        "quartet": ["precision=quartet"],
        "nvfp4 skip_blocks=0": ["precision=nvfp4", "precision.skip_blocks=0"],
        "nvfp4 wgrad_transform=null": ["precision=nvfp4", f"{NVFP4}.wgrad_transform=null"],
        "nvfp4 wgrad_transform.vector=[]": ["precision=nvfp4", f"{NVFP4}.wgrad_transform.vector=[]"],
        "nvfp4 dgrad_dh.candidates=[1,1.5]": ["precision=nvfp4", f"+{NVFP4}.dgrad_dh.candidates=[1,1.5]"],
        "nvfp4 dgrad_w.two_dimensional=false,forward_w.two_dimensional=false": [
            "precision=nvfp4",
            f"{NVFP4}.forward_w.two_dimensional=false",
        ],
    }
    assert [arm.name for arm in arms_of([planned(*words) for words in names.values()])] == [*names]
    (alone,) = arms_of([planned("precision=nvfp4", f"+{NVFP4}.dgrad_dh.random_bits=8")])
    assert alone.name.startswith("nvfp4 dgrad_dh.random_bits=8")


OLD: Value = (("0.from_step", 0.0), ("0.plan.a", (("forward_x.format", "E2M1"), ("wgrad_transform.size", 16.0))))


@each(
    ("value", "found"),
    [
        (OLD, {}),
        ((OLD[0], ("0.plan.a", (("forward_x.format", "E2M1"),))), {"wgrad_transform": None}),  # type: ignore[index]
        ((OLD[0], ("0.plan.a", "mxfp8")), {}),  # type: ignore[index]
        (None, {}),
    ],
)
def test_what_cannot_be_said_of_single_fields_is_left_to_others(value: Value, found: dict[str, Value]) -> None:
    assert changes(value, OLD) == found

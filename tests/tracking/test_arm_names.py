"""Names of arms are the shortest that tell them apart, from choices if these say it all, else from values."""

from __future__ import annotations

import math
from typing import Any

from arm_configs import pretrain, run

from mxstudy.tracking.arm_names import differing_parts, short_key, texts_of
from mxstudy.tracking.arms import Described, arms_of


def names(*runs: Described) -> list[str]:
    return [arm.name for arm in arms_of(runs)]


def test_only_what_differs_is_named() -> None:
    quickstart = [run("rmsnorm", "bf16"), run(), run("mxnorm_p1"), run("mxnorm_p2")]
    assert names(*quickstart) == ["bf16 rmsnorm", "mxfp8 rmsnorm", "mxfp8 mxnorm_p1", "mxfp8 mxnorm_p2"]
    assert names(*quickstart[1:]) == ["rmsnorm", "mxnorm_p1", "mxnorm_p2"]
    assert names(*quickstart[:2]) == ["bf16", "mxfp8"]


def test_what_goes_along_with_a_choice_is_left_out() -> None:
    """A larger model with a smaller micro-batch is named by the model alone."""
    sizes: dict[str, Any] = {"small": {"model__num_layers": 8}, "large": {"model__num_layers": 16, "train__steps": 9}}
    made = [Described(pretrain(**values), {"model": model}) for model, values in sizes.items()]
    assert names(*made) == ["model=small", "model=large"]


def test_without_choices_values_are_named_but_for_what_a_choice_gives_exactly() -> None:
    assert names(*(Described(pretrain(norm), {}) for norm in ("rmsnorm", "mxnorm_p2"))) == ["rmsnorm", "mxnorm_p2"]
    assert names(*(Described(pretrain(train__batch_size=n), {}) for n in (4, 8))) == ["batch_size=4", "batch_size=8"]


def test_two_values_of_which_each_is_given_by_a_choice_are_told_apart() -> None:
    """away is what fidelity=clean starts from, and even is what it sets itself, so neither departs from it."""
    runs = [
        Described(pretrain(precision__rounding=r), {"precision": "mxfp8", "norm": "rmsnorm", "fidelity": "clean"})
        for r in ("even", "away")
    ]
    assert len({*names(*runs)}) == 2


def test_a_key_is_as_short_as_it_can_be() -> None:
    keys = ["optimizer.lr", "norm.eps", "optimizer.eps"]
    assert [short_key(key, keys) for key in keys] == ["lr", "norm.eps", "optimizer.eps"]


def test_numbers_have_the_digits_that_they_need() -> None:
    """2.000001 was once p=2, and two seeds above a million were one."""
    assert texts_of([0.0001220703125, 2.0, True, None]) == ["0.0001220703125", "2", "true", "null"]
    assert texts_of([300.0, 1e-5, 1234567.0, 0.1, math.inf]) == ["300", "1e-05", "1234567", "0.1", "inf"]
    for powers in ([2.000001], [2.000002], [2.000001, 3.0], [2.000001, 2.0]):
        made = [Described(pretrain("mxnorm_p2", norm__p=p), {"norm": "mxnorm_p2"}) for p in powers]
        assert [name for name in names(*made) if str(powers[0]) in name] == names(*made)[:1]
    units = {run(seed=seed).unit for seed in (1234567, 1234568, 2**64 - 2, 2**64 - 1)}
    assert len(units) == 4


def test_a_text_of_several_lines_stays_in_its_row() -> None:
    assert texts_of(["def f(", "KING:\n"]) == ["def f(", "'KING:\\n'"]


def test_of_paths_the_parts_that_differ_are_named() -> None:
    assert differing_parts(["/r/a/x/100", "/r/b/x/100"]) == ["a", "b"]
    assert differing_parts(["r/a/x/100", "r/a/x/200"]) == ["100", "200"]
    assert differing_parts(["r/a", "r/a/b"]) == ["a", "a/b"]

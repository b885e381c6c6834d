"""Each arm has a colour, which it keeps when others are added."""

from __future__ import annotations

from arm_configs import run

from mxstudy.tracking.arm_colors import KNOWN, shaded
from mxstudy.tracking.arms import arms_of


def test_a_known_arm_has_its_colour_in_every_set_and_order() -> None:
    runs = [run("rmsnorm", "bf16"), run(), run("mxnorm_p1"), run("mxnorm_p2")]
    wanted = [KNOWN[name] for name in ("bf16", "rmsnorm", "mxnorm_p1", "mxnorm_p2")]
    assert [arm.color for arm in arms_of(runs)] == wanted
    assert [arm.color for arm in arms_of(runs[::-1])] == wanted[::-1]


def test_a_power_that_is_almost_a_known_one_is_another_arm() -> None:
    (alone,) = arms_of([run("mxnorm_p2", norm__p=2.000001)])
    assert alone.color not in KNOWN.values()


def test_every_arm_has_its_own_colour_and_keeps_it_when_others_are_added() -> None:
    runs = [run("mxnorm_p2", optimizer__lr=lr / 1000) for lr in range(1, 17)]
    colors = [arm.color for arm in arms_of(runs)]
    assert len({*colors}) == 16
    for count in (1, 2, 5, 15):
        assert [arm.color for arm in arms_of(runs[:count])] == colors[:count]
    assert [arm.color for arm in arms_of([*runs, run()])][-1] == KNOWN["rmsnorm"]  # no arm has it


def test_a_recipe_has_its_colour_whatever_model_it_trains() -> None:
    sizes = [[run("rmsnorm", **size), run(precision="mxfp4", **size)] for size in ({}, {"train__steps": 7})]
    one, other = ([arm.color for arm in arms_of(runs)] for runs in sizes)
    assert one == other
    assert one[1] not in KNOWN.values()


def test_seeds_have_the_colour_of_their_arm() -> None:
    assert len({arm.color for arm in arms_of([run(seed=seed) for seed in range(3)])}) == 1


def test_the_baseline_is_coloured_first() -> None:
    one, other = (run("mxnorm_p2", optimizer__lr=lr) for lr in (1e-3, 2e-3))
    assert next(arm.color for arm in arms_of([one, other])) == KNOWN["mxnorm_p2"]
    chosen = [
        run("mxnorm_p2", optimizer__lr=1e-3),
        run("rmsnorm", norm__kind="mxnorm", norm__p=2.0, baseline__norm="rmsnorm"),
    ]
    assert [arm.color for arm in arms_of(chosen)][1] == KNOWN["mxnorm_p2"]


def test_shades_are_colours() -> None:
    assert [shaded("#804020", shade) for shade in (0.5, 1.0, 1.5)] == ["#402010", "#804020", "#C0A090"]

"""Configs of two papers' language models say what the papers say.

They cover rates that go with sizes, tokens, arms, warm-up and phases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composing import compose, compose_job, validated
from each import slow_but

from mxstudy.config import read_run
from mxstudy.studies.pretrain.built import build_model, sampling_of

pytestmark = pytest.mark.integration

# Rate, final rate, batch and sequence by size: table 2, and section 3.3 for the 8B on 15 trillion tokens.
SIZES = {1024: (2.5e-4, 2.5e-7, 256, 4096), 2048: (2e-4, 2e-7, 256, 4096), 4096: (3e-4, 3e-7, 1024, 4096)}
PARAMETERS = {1024: 826e6, 2048: 2.26e9, 4096: 7.73e9}  # called 843M, 2B and 8B
SECOND_8B = (6e-4, 6e-6, 768, 8192)
TRILLIONS = {"scale_rounding": {0.3, 1.0}, "element_formats": {1.0}, "mxfp8_vs_bf16": {15.0}}


def rates_and_sizes(config: Any) -> tuple[float, ...]:
    lr, train = config.optimizer.lr, config.train
    return (lr, pytest.approx(lr * config.schedule.final_ratio), train.batch_size, train.sequence_length)


@pytest.mark.parametrize("sweep", slow_but(["element_formats"], TRILLIONS))
def test_sizes_of_the_recipe_have_their_rates_batches_and_tokens(sweep: str) -> None:
    configs = [validated(one) for one in compose(f"+sweep={sweep}", each_value_once=True)]
    for config in configs:
        known = SECOND_8B if sweep == "mxfp8_vs_bf16" else SIZES[config.model.hidden_size]
        assert known == rates_and_sizes(config)
        assert config.schedule.kind == "cosine"
        with torch.device("meta"):
            parameters = build_model(config).num_params()
        assert parameters == pytest.approx(PARAMETERS[config.model.hidden_size], rel=2e-3)
    tokens = {c.train.steps * c.train.batch_size * c.train.sequence_length for c in configs}
    assert {round(one / 1e12, 3) for one in tokens} == TRILLIONS[sweep]


@pytest.mark.parametrize("sweep", slow_but(["element_formats"], TRILLIONS))
def test_a_rate_on_the_command_line_wins(sweep: str) -> None:
    jobs = compose(f"+sweep={sweep}", "optimizer.lr=1e-3", each_value_once=True)
    assert {one.values["optimizer"]["lr"] for one in jobs} == {1e-3}


def test_the_recipe_s_arms_are_those_of_its_figures() -> None:
    arms: dict[float, list[tuple[str, str]]] = {}
    for one in compose("+sweep=scale_rounding"):
        rule = one.values["precision"]["scale_rule"]
        arms.setdefault(one.values["train"]["steps"], []).append((one.choices["precision"], rule))
    quantised = [(plan, rule) for plan in ("mxfp8", "mxfp8_e5m2_grad") for rule in ("floor", "rceil")]
    assert arms == {steps: [("bf16", "rceil"), *quantised] for steps in (286_102, 953_674)}


def test_the_recipe_changes_its_blend_at_60_percent_of_the_steps() -> None:
    config = validated(compose_job("+experiment=mxfp8_vs_bf16"))
    assert [phase.from_fraction for phase in config.data.phases] == [0.0, 0.6]
    assert sampling_of(config).first_steps == [0, 1_430_512, 2_384_186]


@pytest.mark.parametrize("sweep", slow_but(["post_round"], ["convergence", "post_round"]))
def test_the_llamas_warm_up_as_their_public_configs_do_or_as_torchtitan(sweep: str) -> None:
    def schedules(*overrides: str) -> set[tuple[str, int, float]]:
        configs = [read_run(one.values) for one in compose(f"+sweep={sweep}", *overrides, each_value_once=True)]
        return {(c.schedule.kind, c.schedule.warmup(c.train.steps), c.schedule.final_ratio) for c in configs}

    assert schedules() == {("cosine", 2000, 0.01)}
    assert schedules("schedule=torchtitan") == {("linear", 200, 0.0)}

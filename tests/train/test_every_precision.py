"""Every row of PRECISIONS, recipe of conf/precision and norm trains, and evaluates sequences that no block divides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from each import slow_but
from precision_files import FILES, of_file
from tiny import CONFIG, MXNORM, RMSNORM, build, precision

from mxstudy import config
from mxstudy.blocks.plans import ANY
from mxstudy.config.casts import Gemms
from mxstudy.model.describe_precision import describe
from mxstudy.model.precision import evaluated
from mxstudy.train.loop import set_precision, train
from mxstudy.train.signals import Leave

NORMS = {"rmsnorm": RMSNORM, "mxnorm_p2": MXNORM, "mxnorm_postround": config.PostRoundMXNorm()}
IN_MAKE_TEST = [
    *((row, "rmsnorm") for row in ("mxfp8_backward_only", "fp8_tensor")),
    ("mxfp8", "mxnorm_postround"),
    ("nvfp4_forward_only", "mxnorm_p2"),
]
ROWS = [name for name in config.PRECISIONS if name != "fp32"]
SIZES = {"fp8_blockwise": "blocks of 128 do not divide keys, 32"}
FORWARD_IN_BF16 = ("bf16", "mxfp8_backward_only", "mxfp4_rht_sr")


STEPS, LR = 5, 2e-2  # a rate that learns much in few steps


def settings(row: str, norm: config.Norm) -> config.Pretrain:
    block_size = 16 if row.startswith("nvfp4") else 32
    plan = replace(precision((0, row)), block_size=block_size, operand_pre_round=row == "mxfp6_e2m3")
    plan = of_file(row) if row in FILES else plan
    model = replace(CONFIG.model, ffn_size=128)
    return replace(CONFIG, model=model, norm=norm, precision=plan, optimizer=config.AdamW(lr=LR))


def of_one_block(given: config.Pretrain) -> config.Pretrain:
    """Return the settings for a model of one block, but of two where a recipe leaves the last one out."""
    return replace(given, model=replace(given.model, num_layers=2 if given.precision.skip_blocks == "tail" else 1))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("row", "norm"),
    slow_but(IN_MAKE_TEST, [(row, "rmsnorm") for row in (*ROWS, *FILES)] + IN_MAKE_TEST[-2:]),
)
def test_it_learns_and_evaluates(row: str, norm: str) -> None:
    given = of_one_block(settings(row, NORMS[norm]))
    run, memory = build(given, steps=STEPS)
    assert train(run, 0, Leave()) == "finished"
    assert memory.losses[-1] < memory.losses[0] - 0.5
    tokens = torch.randint(0, 128, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = run.model(tokens)
        plain = build(replace(given, precision=settings("bf16", NORMS[norm]).precision))[0].model
        plain.load_state_dict(run.model.state_dict())
        difference = (logits - plain(tokens)).norm() / logits.norm()
    assert logits.shape == (1, 37, 128)
    assert difference < 0.5
    assert (difference == 0) == (row in FORWARD_IN_BF16)


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(["nvfp4", "quartet"], FILES))
def test_the_plan_and_the_probes_know_a_recipe_of_a_file(name: str) -> None:
    """Linears have the file's recipe, and a block is fused, or says which part no kernel computes."""
    scheduled = config.Probes(
        saturation=config.Saturation(every_steps=1), gradient_bias=config.GradientBias(every_steps=1)
    )
    given = replace(settings(name, RMSNORM), probe=scheduled)
    run, memory = build(given, steps=1)
    recipe = given.precision.recipe(name).filled(given.precision.settings)
    assert run.model.layers[0].attention.wo.gemms == recipe
    assert (run.model.layers[1].attention.wo.gemms == Gemms()) == (given.precision.skip_blocks == "tail")
    plan = set_precision(run.model, given, 0, run.device)
    reason = ANY.why_not(recipe) or SIZES.get(name)
    assert plan["backends"]["layers.0"] == ("reference" if reason else "fused")
    said = describe(run.model, plan["precision"])
    assert (reason or "fused") in said
    assert ("not quantised: block 1 of 0 to 1, 50% of the linears" in said) == (given.precision.skip_blocks == "tail")
    assert train(run, 0, Leave()) == "finished"
    measured = {row["probe"]: row["values"] for row in memory.rows if "probe" in row}
    errors = {key: value for key, value in measured["saturation"].items() if key.endswith("sqnr_db")}
    assert len(errors) == 4 * len([*recipe.casts()]) * (1 if given.precision.skip_blocks == "tail" else 2)
    assert all(5 < value < 60 for value in errors.values())
    assert measured["gradient_bias"]["layers.0.attention.wqkv.weight/cosine"] > 0.6


def test_two_recipes_have_no_kernels() -> None:
    """They run by the reference, with these reasons; all others are fused."""
    given = {name: settings(name, RMSNORM).precision for name in (*ROWS, *FILES)}
    reasons = {
        name: ANY.why_not(precision.recipe(name).filled(precision.settings)) for name, precision in given.items()
    }
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "nvfp4_forward_only": "fused kernels do not support forward_x.outer_scale=bound, only none or tensor",
        "quartet": "fused kernels do not support forward_x.statistic=std, only absmax",
    }


def test_each_part_of_nvfp4_is_turned_off_by_one_override() -> None:
    """An override turns off what a flag of Transformer Engine turns off, and nothing else."""
    own = "precision.recipes.nvfp4"
    on = of_file("nvfp4").recipe("nvfp4")
    for word, expected in {
        f"{own}.dgrad_dh.rounding=even": {name: {"rounding": "even"} for name in ("dgrad_dh", "wgrad_dh")},
        f"{own}.forward_w.two_dimensional=false": {n: {"two_dimensional": False} for n in ("forward_w", "dgrad_w")},
    }.items():
        changed = {name: replace(getattr(on, name), **values) for name, values in expected.items()}
        assert of_file("nvfp4", word).recipe("nvfp4") == replace(on, **changed) != on
    assert of_file("nvfp4", f"{own}.wgrad_transform=null").recipe("nvfp4") == replace(on, wgrad_transform=None)
    assert of_file("nvfp4", "precision.skip_blocks=[2,8]").skip_blocks == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["fp8_tensor", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4_forward_only"])
def test_a_mixture_of_experts_learns_and_evaluates(row: str) -> None:
    given = of_one_block(settings(row, MXNORM))
    experts = replace(given.model, mlp="moe", moe=config.MoE(num_shared=1))
    run, memory = build(replace(given, model=experts), steps=STEPS)
    assert train(run, 0, Leave()) == "finished"
    assert memory.losses[-1] < memory.losses[0] - 0.5
    tokens = torch.randint(0, 128, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), evaluated(run.model):
        assert run.model(tokens).isfinite().all()


@pytest.mark.integration
def test_the_last_token_of_an_evaluation_depends_on_no_later_batch() -> None:
    """NVFP4 has a tensor scale per token, so a sequence has the same logits alone and beside a louder one."""
    run, _ = build(settings("nvfp4_forward_only", MXNORM))
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(run.model(tokens)[:1], run.model(tokens[:1]), rtol=1e-2, atol=1e-2)

"""An answer depends on its question alone, whatever recipe the model was trained with."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from tiny import CONFIG, build
from tiny import MODEL as TINY

from mxstudy import config
from mxstudy.config.casts import BlockCast, Cast, Gemms, Hadamard
from mxstudy.config.recipes import PRECISIONS
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.scorer import Request, Scorer
from mxstudy.model.backends import backends_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear
from mxstudy.model.precision import DTYPES, apply_precision, evaluated, for_evaluation
from mxstudy.numerics.formats import is_random
from mxstudy.train.loop import train_step

CPU = torch.device("cpu")
MODEL = replace(TINY, init="mitchell")  # attention matters as much as the embedding
STOCHASTIC = Cast(format="E4M3", rounding="stochastic", random_bits=8)
ALL_STOCHASTIC = Gemms(
    forward_x=STOCHASTIC, forward_w=STOCHASTIC, dgrad_dh=STOCHASTIC, wgrad_dh=STOCHASTIC, wgrad_x=STOCHASTIC
)
RECIPES: dict[str, dict[str, Gemms]] = {"fp8_tensor": {}, "own": {"own": ALL_STOCHASTIC}}
TWO_LEVELS = Cast(format="E2M1", scale="E4M3", outer_scale="tensor", chain="training")
FUSED = RECIPES | {"two_levels": {"two_levels": Gemms(forward_x=TWO_LEVELS, forward_w=TWO_LEVELS)}}


def precision(row: str, **recipes: Gemms) -> config.Precision:
    return config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),), recipes=recipes)


def decoder(row: str, compute: str = "fp32", evaluates: bool = True) -> Decoder:
    plan = precision(row, **FUSED.get(row, {}))
    model = Decoder(MODEL, config.MXNorm(p=2.0), plan.settings, DTYPES[compute])
    model.init_weights(0)
    apply_precision(model, plan, 0, compute, CPU, evaluates=evaluates)
    return model


def questions() -> list[Request]:
    """Return questions of many lengths, so that batches of several sizes have others beside them."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 128, (int(n),), generator=draw).tolist() for n in torch.arange(4, 24)]
    return [Request(tuple(text[:-2]), tuple(text[-2:])) for text in texts]


def scores(model: Decoder, tokens_per_batch: int) -> list[float]:
    return [one.nats for one in Scorer(model, 64, tokens_per_batch).score(questions())]


def most(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def test_only_what_depends_on_the_batch_is_another() -> None:
    stochastic = ALL_STOCHASTIC.filled(BlockCast())
    even = replace(STOCHASTIC, rounding="even", random_bits=24).filled(BlockCast())
    assert for_evaluation(stochastic) == replace(stochastic, forward_x=even, forward_w=even)
    tensor = PRECISIONS["fp8_tensor"].filled(BlockCast())
    assert tensor.forward_x is not None
    rows = replace(tensor.forward_x, outer_scale="row")
    assert for_evaluation(tensor) == replace(tensor, forward_x=rows)
    both = replace(tensor, forward_x=replace(tensor.forward_x, rounding="stochastic"))
    assert for_evaluation(both) == replace(both, forward_x=replace(rows, rounding="even"))


@each("name", sorted(PRECISIONS.keys() - {"fp8_tensor"}))
def test_all_other_recipes_are_asked_as_they_are(name: str) -> None:
    recipe = PRECISIONS[name].filled(BlockCast(16))
    assert for_evaluation(recipe) is recipe


def test_what_the_backward_rounds_and_how_a_gemm_is_rotated_stays() -> None:
    recipe = Gemms(dgrad_dh=STOCHASTIC, forward_transform=Hadamard(size=32, signs="seed")).filled(BlockCast())
    assert for_evaluation(recipe) is recipe


@pytest.mark.integration
@pytest.mark.parametrize("row", RECIPES)
def test_what_else_is_in_the_batch_changes_no_log_likelihood(row: str) -> None:
    model = decoder(row)
    alone = scores(model, 1)
    assert most(scores(model, 100), alone) < 1e-4
    assert most(scores(model, 10_000), alone) < 1e-4
    as_trained = decoder(row, evaluates=False)  # the test would notice
    assert most(scores(as_trained, 10_000), scores(as_trained, 1)) > 0.01


@pytest.mark.parametrize("row", RECIPES)
def test_a_model_that_is_trained_is_asked_the_same_way_and_is_put_back(row: str) -> None:
    model = decoder(row, evaluates=False)
    before = {linear: (linear.gemms, linear.random) for linear in linears(model)}
    with evaluated(model):
        found = scores(model, 100)
    assert found == scores(decoder(row), 100)
    assert all(linear.gemms is gemms and linear.random is random for linear, (gemms, random) in before.items())


def linears(model: Decoder) -> list[MXLinear]:
    return [module for module in model.modules() if isinstance(module, MXLinear)]


@pytest.mark.parametrize("row", ["own", "mxfp8"])
def test_joined_blocks_stay_joined_and_come_back(row: str) -> None:
    model = decoder(row, compute="bf16", evaluates=False)
    settings = [layer.fused for layer in model.layers]
    assert set(backends_of(model).values()) == {"fused"}
    with evaluated(model):
        assert all(layer.fused is not None for layer in model.layers)
        assert all((layer.fused is own) == (row == "mxfp8") for layer, own in zip(model.layers, settings, strict=True))
        found = scores(model, 100)
    assert found == scores(decoder(row, compute="bf16"), 100)
    assert all(layer.fused is own for layer, own in zip(model.layers, settings, strict=True))


def test_a_joined_block_whose_evaluation_has_no_kernel_is_apart_and_comes_back() -> None:
    """X's tensor scale becomes one scale per row, which no kernel computes."""
    model = decoder("two_levels", compute="bf16", evaluates=False)
    settings = [layer.fused for layer in model.layers]
    assert None not in settings
    with evaluated(model):
        assert all(layer.fused is None for layer in model.layers)
        found = scores(model, 100)
    assert found == scores(decoder("two_levels", compute="bf16"), 100)
    assert all(layer.fused is own for layer, own in zip(model.layers, settings, strict=True))


def test_it_is_put_back_after_an_error_too() -> None:
    model = decoder("own", evaluates=False)
    with pytest.raises(KeyError), evaluated(model):
        raise KeyError
    assert is_random(model.layers[0].attention.wo.gemms.forward_x)


@pytest.mark.integration
@pytest.mark.parametrize("row", RECIPES)
def test_the_training_goes_on_with_the_same_bits(row: str) -> None:
    settings = replace(CONFIG, precision=precision(row, **RECIPES[row]))
    (one, _), (other, _) = build(settings), build(settings)
    for step in range(3):
        assert train_step(one, step).loss == train_step(other, step).loss
        with evaluated(one.model), torch.no_grad():
            one.model(torch.arange(64)[None])


def test_random_numbers_of_a_loaded_model_are_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe has random signs in the forward and stochastic rounding in the backward, by the run's own seed."""
    signs = Hadamard(size=32, signs="seed")
    recipe = Gemms(forward_x=Cast(format="E4M3"), wgrad_dh=STOCHASTIC, forward_transform=signs)
    plan = precision("own", own=recipe)
    trained = Decoder(MODEL, config.MXNorm(p=2.0), plan.settings, torch.float32)
    trained.init_weights(0)
    apply_precision(trained, plan, 0, "fp32", CPU, (5,))
    shapes = {name: parameter.shape for name, parameter in trained.named_parameters()}
    tokenizer: Any = None
    about = Trained("run", MODEL, config.MXNorm(p=2.0), plan, "fp32", tokenizer, 64, shapes, None, seed=5)
    (tmp_path / "checkpoint.json").write_text("{}")
    weights = copy.deepcopy(trained.state_dict())
    monkeypatch.setattr(checkpoints, "load_weights", lambda path, model: model.load_state_dict(weights))
    loaded = checkpoints.load(tmp_path, about, CPU)
    drawn = [linear.random for linear in linears(loaded) if linear.random is not None]
    assert len(drawn) == 8
    assert all(tensor.device == CPU for random in drawn for tensor in random)
    assert len({id(random.places) for random in drawn}) == 1
    with torch.no_grad():
        tokens = torch.arange(64)[None]
        assert torch.equal(loaded(tokens), trained(tokens))
        other = checkpoints.load(tmp_path, replace(about, seed=6), CPU)
        assert not torch.equal(other(tokens), trained(tokens))

"""Every field of a cast and of a transform counts on every operand and backend, or the backend says why not.

The cases are made from the types: a field that is added to `Cast` or `Hadamard`, and not to the tables here, fails a
test. A case is one training step of a small decoder whose recipe differs from another in one field of one operand. With
the reference the step must differ. Fused, it must have the reference's bits, or the plan has a reason that names the
operand and the field.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, make_dataclass, replace
from typing import Any

import pytest
import torch
from each import each
from torch import Tensor

from mxstudy import config
from mxstudy.blocks import plans as block_plans
from mxstudy.config.casts import OPERANDS, TRANSFORMS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.kernels.implements import Implements
from mxstudy.model.activation_functions import swiglu
from mxstudy.model.backends import apply_backends, plan_backends
from mxstudy.model.decoder import Decoder
from mxstudy.model.fusable import Backend, Target
from mxstudy.model.linear import MXLinear
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.model.random_streams import move_to
from mxstudy.numerics.formats import FORMATS, ROUNDINGS, SCALE_RULES, ElementFormat, Rounding
from mxstudy.reader import ConfigError

MODEL = config.Decoder(hidden_size=128, ffn_size=128, num_layers=1, num_heads=4, num_kv_heads=4, vocab_size=128)
HERE = Target(torch.bfloat16, torch.device("cpu"))
E2M1 = Cast(format="E2M1")
NVFP4 = Cast(format="E2M1", block_size=16, scale="E4M3", outer_scale="tensor")
TRAINING = replace(NVFP4, chain="training")
FLOOR = Cast(format="E2M1", scale_rule="floor")
FP32 = Cast(format="E2M1", scale="FP32")

# For each field of a cast: casts that differ in it from the cast beside them.
CHANGES: dict[str, list[tuple[Cast, Cast]]] = {
    "format": [(E2M1, Cast(format=name)) for name in ("E4M3", "E5M2", "E3M2", "E2M3", "E1M2")],
    "block_size": [(E2M1, Cast(format="E2M1", block_size=size)) for size in (16, 64, 128)]
    + [(FP32, replace(FP32, block_size=size)) for size in (64, 128)],
    "two_dimensional": [(cast, replace(cast, two_dimensional=True)) for cast in (E2M1, FP32)],
    "scale": [
        (E2M1, FP32),
        (E2M1, Cast(format="E2M1", scale="E4M3")),
        (E2M1, Cast(format="E2M1", scale="E4M3", chain="training")),
        (E2M1, Cast(format="E2M1", scale="none", outer_scale="tensor")),
    ],
    "scale_rule": [(E2M1, Cast(format="E2M1", scale_rule=rule)) for rule in SCALE_RULES if rule != "rceil"],
    "outer_scale": [
        (cast, replace(cast, outer_scale=scope)) for cast in (NVFP4, TRAINING) for scope in ("none", "row", "bound")
    ],
    "chain": [
        (E2M1, TRAINING),
        (replace(NVFP4, outer_scale="row"), replace(NVFP4, outer_scale="row", chain="training")),
    ],
    "largest_scale": [(cast, replace(cast, largest_scale=256.0)) for cast in (NVFP4, TRAINING)],
    "statistic": [(FLOOR, replace(FLOOR, statistic="std"))],
    "headroom": [
        *((cast, replace(cast, headroom=0.75)) for cast in (E2M1, FLOOR, FP32)),
        *((cast, replace(cast, headroom=16 / 17)) for cast in (NVFP4, TRAINING)),
    ],
    "candidates": [(cast, replace(cast, candidates=(1.0, 1.5))) for cast in (NVFP4, TRAINING)],
    "candidate_error": [
        (replace(cast, candidates=(1.0, 1.5)), replace(cast, candidates=(1.0, 1.5), candidate_error="mae"))
        for cast in (NVFP4, TRAINING)
    ],
    "rounding": [(cast, replace(cast, rounding="stochastic")) for cast in (E2M1, FP32)],
    "random_bits": [
        (Cast(format="E2M1", rounding="stochastic"), Cast(format="E2M1", rounding="stochastic", random_bits=8))
    ],
    "source": [(E2M1, replace(E2M1, source="forward"))],
    "mask_clipped": [(FLOOR, replace(FLOOR, mask_clipped=True))],
}
# Fields that change nothing here: inputs are bf16 numbers, so rounding to bf16 has no effect, and blocks divide every
# axis.
IDLE: dict[str, list[tuple[Cast, Cast]]] = {
    "pre_round": [(E2M1, Cast(format="E2M1", pre_round=True))],
    "pad": [(cast, replace(cast, pad=True)) for cast in (E2M1, FP32)],
    "rounding": [(E2M1, Cast(format="E2M1", rounding="away"))],
}
TRANSFORM = Hadamard(size=32)
TRANSFORM_CHANGES = {
    "size": [(TRANSFORM, Hadamard(size=size)) for size in (16, 64, 128)],
    "signs": [(TRANSFORM, Hadamard(size=32, signs=signs)) for signs in ("seed", "step", "call")],
    "vector": [
        (TRANSFORM, Hadamard(size=32, vector=(1, 1, 1, -1, 1, -1, -1, -1) * 2 + (-1, -1, 1, -1, 1, -1, 1, 1) * 2))
    ],
    "signs_after": [(Hadamard(size=32, signs="seed"), Hadamard(size=32, signs="seed", signs_after=True))],
}


def recipe(**operands: Cast | Hadamard | None) -> Gemms:
    """Return a recipe with all operands in E2M1, except those that are given."""
    return Gemms(**{**dict.fromkeys(OPERANDS, E2M1), **operands})


def cases() -> Iterator[tuple[str, Gemms, Gemms, bool]]:
    """Yield name, recipe, recipe with one field changed, and whether the numbers have to change."""
    for table, counts in ((CHANGES, True), (IDLE, False)):
        for field, pairs in table.items():
            for operand in OPERANDS:
                for i, (one, other) in enumerate(pairs):
                    if other.outer_scale == "bound" and not operand.endswith("_x"):
                        continue
                    if field == "source" and operand not in ("dgrad_w", "wgrad_x"):
                        continue
                    if field == "mask_clipped" and not operand.startswith("forward"):
                        continue
                    yield f"{operand}.{field}.{i}", recipe(**{operand: one}), recipe(**{operand: other}), counts
    for field, pairs in TRANSFORM_CHANGES.items():
        for name in TRANSFORMS:
            for i, (one, other) in enumerate(pairs):
                # Signs after the transform change no magnitude, and a symmetric cast gives the same numbers.
                counts = field != "signs_after"
                yield f"{name}.{field}.{i}", recipe(**{name: one}), recipe(**{name: other}), counts


CASES = list(cases())
FIELDS = sorted({name.split(".")[1] for name, *_ in CASES})


def decoder(gemms: Gemms, norm: config.Norm | None = None, settings: BlockCast | None = None) -> Decoder:
    """Return a decoder whose linears all have that recipe, by the reference."""
    norm = norm or config.RMSNorm()
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "own"}),), recipes={"own": gemms})
    model = Decoder(MODEL, norm, precision.settings, DTYPES["bf16"])
    model.init_weights(0)
    apply_precision(model, replace(precision, backend="reference"), 0, "bf16", HERE.device, (7,))
    move_to(model, 5, 64)
    return model


def step(model: Decoder) -> list[Tensor]:
    """Return loss and gradients of one step, which are large enough for E4M3 scales without a scale above them."""
    tokens = torch.randint(128, (2, 64), generator=torch.Generator().manual_seed(1))
    loss = torch.nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    return [loss.detach(), *torch.autograd.grad(loss * 2**12, list(model.parameters()))]


@functools.cache
def by_the_reference(gemms: Gemms) -> list[Tensor]:
    return step(decoder(gemms))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def backend_of(model: Decoder) -> Backend:
    return plan_backends(model, "auto", HERE)["layers.0"]


def take(model: Decoder) -> None:
    apply_backends(model, plan_backends(model, "fused", HERE), HERE)


def test_every_field_has_a_case() -> None:
    assert {f.name for f in fields(Cast)} == CHANGES.keys() | IDLE.keys()
    assert {f.name for f in fields(Hadamard)} == TRANSFORM_CHANGES.keys()
    assert set(OPERANDS) | set(TRANSFORMS) == {f.name for f in fields(Gemms)}


def fused_or_reason(model: Decoder, reference: list[Tensor], named: str) -> None:
    """Check that the backend has the reference's bits, or a reason that names the operand."""
    planned = backend_of(model)
    if planned.name == "reference":
        assert named in str(planned.why), planned
        return
    take(model)
    assert model.layers[0].fused is not None
    assert same(step(model), reference)


@pytest.mark.integration
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_counts_on_every_backend_or_is_refused(field: str) -> None:
    @each(("name", "one", "other", "counts"), [case for case in CASES if case[0].split(".")[1] == field])
    def counts_or_is_refused(name: str, one: Gemms, other: Gemms, counts: bool) -> None:
        model = decoder(other)
        found = by_the_reference(other)
        if counts:
            assert not same(found, by_the_reference(one)), "the reference ignores it"
        fused_or_reason(model, found, name.partition(".")[0])

    counts_or_is_refused()


def is_refused(gemms: Gemms) -> bool:
    return block_plans.ANY.why_not(gemms.filled(BlockCast())) is not None


@pytest.mark.integration
@each(("name", "other"), [(name, other) for name, _, other, counts in CASES if counts][::3])
def test_a_backend_that_accepts_too_much_is_found_out(name: str, other: Gemms) -> None:
    """A backend that accepts every value is found out.

    It fails the test above for each value that it does not compute, and for no other.
    """
    model, refused = decoder(other), is_refused(other)
    found = by_the_reference(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Implements, "why_not", lambda self, gemms: None)
        with pytest.raises((AssertionError, ConfigError)) if refused else nullcontext():
            fused_or_reason(model, found, name.partition(".")[0])


# -------------------------------------------------------------------------------------------- ideas that nobody has had


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "E2M2", ElementFormat("E2M2", exponent_bits=2, mantissa_bits=2, max=7.0))
    monkeypatch.setitem(ROUNDINGS, "down", Rounding(torch.trunc))
    monkeypatch.setitem(SCALE_RULES, "double", lambda fmt: 2**23)


@pytest.mark.integration
@pytest.mark.usefixtures("toys")
@each("toy", [{"format": "E2M2"}, {"rounding": "down"}, {"scale_rule": "double"}], ids=lambda toy: next(iter(toy)))
@each("operand", OPERANDS)
def test_a_row_that_is_added_to_a_table_counts(toy: dict[str, str], operand: str) -> None:
    model = decoder(recipe(**{operand: replace(E2M1, **toy)}))
    found = step(model)
    assert not same(found, step(decoder(recipe())))
    assert backend_of(model).name == "reference"
    assert f"{operand}.{next(iter(toy))}={next(iter(toy.values()))}" in str(backend_of(model).why)


def test_a_field_that_is_added_is_a_reason() -> None:
    """A fused backend that does not know a field, of a cast or of a transform, does not accept it."""
    Own = make_dataclass("Own", [("toy", bool, False)], bases=(Cast,), frozen=True, kw_only=True)
    Turned = make_dataclass("Turned", [("angle", float, 0.0)], bases=(Hadamard,), frozen=True, kw_only=True)
    toy, turned = recipe(wgrad_dh=Own(format="E2M1", toy=True)), recipe(wgrad_transform=Turned(size=16, angle=0.5))
    for backend, gemms, lacked in (
        (block_plans.ANY, toy, "wgrad_dh.toy=true, only false"),
        (block_plans.PLAIN, toy, "wgrad_dh.toy=true, only false"),
        (block_plans.ANY, turned, "wgrad_transform.angle=0.5, only 0.0"),
        (block_plans.PLAIN, turned, "wgrad_transform"),
    ):
        assert backend.why_not(gemms.filled(BlockCast())) == f"fused kernels do not support {lacked}"
    assert block_plans.ANY.why_not(recipe(wgrad_dh=Own(format="E2M1")).filled(BlockCast())) is None


def test_a_norm_that_inherits_is_another_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxstudy.model import norm as norms

    class MedianNorm(norms.MXNorm):
        def rms(self, x: Tensor) -> Tensor:
            return x.float().abs().median(-1, keepdim=True).values * 1.4826 + self.eps

    plain = step(decoder(recipe(), config.MXNorm(p=2.0)))
    monkeypatch.setitem(
        norms.NORMS, config.MXNorm, lambda norm, size, cast: MedianNorm(size, norm.p, cast.block_size, norm.eps)
    )
    model = decoder(recipe(), config.MXNorm(p=2.0))
    assert not same(step(model), plain)
    assert "MedianNorm has no kernel" in str(backend_of(model).why)


def test_a_field_that_is_added_to_a_norm_is_a_reason() -> None:
    model = decoder(recipe(), config.MXNorm(p=2.0))
    assert backend_of(model).name == "fused"
    model.layers[0].feed_forward.up.norm.clip = 3.0
    assert "MXNorm has clip" in str(backend_of(model).why)


def test_an_activation_that_is_added_or_replaced_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxstudy.model import feed_forward

    plain = step(decoder(recipe()))
    monkeypatch.setitem(
        feed_forward.MLPS, "swiglu", feed_forward.MLPS["swiglu"]._replace(activation=lambda h: swiglu(h) * 1.5)
    )
    model = decoder(recipe())
    assert not same(step(model), plain)
    assert "activation (swiglu) has no kernel" in str(backend_of(model).why)


INNER = {
    "attention": "attention",
    "attention.wqkv": "wqkv",
    "attention.wo": "wo",
    "feed_forward": "MLP",
    "feed_forward.w13": "MLP's first linear",
    "feed_forward.w2": "w2",
}


@each(("place", "said"), [*INNER.items()])
def test_a_module_of_another_class_is_not_fused(place: str, said: str) -> None:
    """Its `forward`, or one that an instance has for itself, may compute something else."""
    model = decoder(recipe())
    assert backend_of(model).name == "fused"
    module = model.layers[0].get_submodule(place)
    module.forward = module.forward
    assert backend_of(model).why == f"its {said} has its own forward, which has no kernel"
    del module.forward
    module.__class__ = type("Own", (type(module),), {})
    assert backend_of(model).why == f"its {said} is a Own, which has no kernel"


@each("change", [{"eps": 1.0}, {"fold_gain": True}])
def test_two_norms_that_differ_are_not_fused(change: dict[str, Any]) -> None:
    """A fused block has the settings of one norm."""
    model = decoder(recipe())
    vars(model.layers[0].feed_forward.up.norm).update(change)
    assert backend_of(model).why == "its two norms differ"


@each("place", INNER)
def test_a_hook_that_a_fused_block_would_never_call_is_refused(place: str) -> None:
    model = decoder(recipe())
    take(model)
    model.layers[0].get_submodule(place).register_forward_hook(lambda module, inputs, h: None)
    with pytest.raises(ConfigError, match=r"precision.backend: a hook of a \w+ is never called .* set it to reference"):
        step(model)


def test_backends_are_those_of_the_block_alone() -> None:
    """A block that fused kernels refuse leaves the others where they are, whatever else a plan says."""
    model = Decoder(replace(MODEL, num_layers=2), config.RMSNorm(), BlockCast(), torch.bfloat16)
    model.init_weights(0)
    linears = [m for m in model.layers.modules() if isinstance(m, MXLinear)]
    for i, linear in enumerate(linears):
        odd = recipe(wgrad_x=replace(FLOOR, statistic="std"))
        linear.gemms = (recipe() if i < 4 else odd).filled(BlockCast())
    planned = plan_backends(model, "auto", HERE)
    assert planned["layers.0"] == Backend("fused")
    assert planned["layers.1"].name == "reference"
    assert "wgrad_x.statistic=std, only absmax" in str(planned["layers.1"].why)

"""A block that computes its MLP's first product again keeps it no longer, and has the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from each import each
from precision_files import of_file
from test_decoder_block import CPU, MODEL, NORMS, ROWS, decoder, forward_of, kept_bytes, precision, run, tokens
from traced import without_code

from mxstudy import config
from mxstudy.model.fused_block import recompute_mlps
from mxstudy.model.precision import apply_precision, evaluated
from mxstudy.reader import ConfigError
from mxstudy.train.runtime import configure_torch

# Both operands of the product drawn, below a scale of the whole tensor, and under a transform with signs by step.
DRAWN = config.Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training", rounding="stochastic")
TURNED = config.Gemms(
    **{f"{gemm}_{operand}": DRAWN for gemm, operand in (("forward", "x"), ("forward", "w"), ("dgrad", "dh"))},
    forward_transform=config.Hadamard(size=16, signs="step"),
)
OWN = {"turned": TURNED, "shared": replace(TURNED, forward_transform=None, dgrad_w=DRAWN, wgrad_x=DRAWN)}
RECIPES = ROWS | {
    name: {"formats": replace(precision(name, block_size=16), recipes={name: gemms})} for name, gemms in OWN.items()
}
RECIPES |= {name: {"formats": of_file(name, "precision.block_size=16")} for name in ("nvfp4", "mxfp8_sr_rht_2d")}

NO_MXNORM = ("fp8_blockwise", "turned")  # its kernel takes the absmax of other blocks than these casts


def same(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.slow
@each(("norm", "recipe"), [(n, r) for n in NORMS for r in RECIPES if n[:2] != "mx" or r not in NO_MXNORM])
def test_no_bit_changes(norm, recipe):
    model = decoder(norm=NORMS[norm], **RECIPES[recipe])
    kept = run(model, tokens(length=64))
    recompute_mlps(model, 2)
    assert [block.fused.recomputes_up for block in model.layers] == [True, True]
    same(run(model, tokens(length=64)), kept)


@each("mlp", ["gelu", "relu2"])
def test_an_mlp_without_a_gate(mlp):
    model = decoder(replace(MODEL, mlp=mlp))
    kept = run(model, tokens())
    recompute_mlps(model, 2)
    same(run(model, tokens()), kept)


def saved_bytes(model):
    """Return the bytes that a forward of all blocks saves for the backward, without the weights."""
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(tokens())
    return sum(size for size, _ in kept.values())


@each("row", ["mxfp8", "bf16"])
@each("norm", ["rmsnorm", "mxnorm p2"])
def test_the_product_is_not_kept(norm, row):
    model = decoder(norm=NORMS[norm], formats=precision(row))
    product = tokens().numel() * 2 * MODEL.ffn_size * torch.bfloat16.itemsize
    before = saved_bytes(model)
    for blocks in (1, 2):
        recompute_mlps(model, blocks)
        assert saved_bytes(model) == before - blocks * product


@pytest.mark.slow
@each("recipe", ["bf16", "nvfp4", "fp8_blockwise"])  # cast by three kernels
def test_a_compiler_does_not_keep_it_either(recipe):
    """It would if it saw two products of the same operands, or operands that depend on the input alone."""
    configure_torch(compile=True)
    model, found = decoder(**RECIPES[recipe]), []
    size, block = model.tok_embeddings.weight.shape[1], model.layers[0]
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    for blocks in (0, 1):
        recompute_mlps(model, blocks)
        compiled = torch.compile(forward_of(block, True), backend=without_code, fullgraph=True)
        found.append(kept_bytes(compiled, parameters, size))
    torch._dynamo.reset()
    (kept, with_product), (again, without) = found
    assert kept - again == 2 * 64 * block.feed_forward.up.out_features * torch.bfloat16.itemsize
    assert all(torch.equal(a, b) for a, b in zip(with_product, without, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiles", [False, True])
def test_no_bit_changes_on_a_gpu(recipe, compiles):
    configure_torch(compile=compiles)
    model = decoder(**RECIPES[recipe]).cuda()
    apply_precision(model, RECIPES[recipe]["formats"], 0, "bf16", torch.device("cuda"))
    if compiles:
        for block in model.layers:
            block.compile(fullgraph=True)
    kept = run(model, tokens(length=64).cuda())
    recompute_mlps(model, 2)
    same(run(model, tokens(length=64).cuda()), kept)
    torch._dynamo.reset()


def test_the_first_blocks_recompute_also_after_an_evaluation():
    model = decoder(formats=of_file("mxfp8_sr_rht_2d"))
    recompute_mlps(model, 1)
    with evaluated(model), torch.no_grad():
        model(tokens())
    assert [block.fused.recomputes_up for block in model.layers] == [True, False]


@each(
    ("options", "ran"),
    [
        ({"formats": precision(backend="reference")}, "reference (precision.backend asks for it)"),
        ({"model": replace(MODEL, dropout=0.1)}, "reference (model.dropout: its masks have no kernel)"),
        (
            {"model": replace(MODEL, mlp="moe")},
            "reference (on CPU its experts are computed one after the other)",
        ),
    ],
    ids=str,
)
def test_a_block_that_is_not_fused_is_refused(options, ran):
    with pytest.raises(ConfigError) as caught:
        recompute_mlps(decoder(**options), 1)
    assert str(caught.value) == (
        f"train.recompute_mlp: layers.0 runs on {ran}, and only a fused block computes a product again; set it to 0"
    )


def test_a_plan_that_changes_its_backend_is_refused_for_the_blocks_in_question():
    rows = (config.PrecisionRow(plan={}), config.PrecisionRow(from_step=5, plan={"layers.1.*": "nvfp4_forward_only"}))
    formats = config.Precision(schedule=rows, block_size=16)
    model = decoder(formats=formats)
    recompute_mlps(model, 2)
    apply_precision(model, formats, 5, "bf16", CPU)
    recompute_mlps(model, 1)
    with pytest.raises(ConfigError, match=r"^train.recompute_mlp: layers.1 runs on reference"):
        recompute_mlps(model, 2)

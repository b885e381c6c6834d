import itertools
import math

import numpy as np
import pytest
import torch
from each import slow_but

from mxstudy import config
from mxstudy.config import PRECISIONS, BlockCast
from mxstudy.model import LayerNorm, MXLinear, MXNorm, NormLinear, RMSNorm
from mxstudy.numerics import fake_quantize
from mxstudy.probes.activations import (
    ActivationHistograms,
    NormOutputRMS,
    count_bins,
    input_and_output_counts,
    mean_squares,
    norm_output,
)
from mxstudy.probes.base import StepView, values_of
from mxstudy.probes.compiled import compiled
from mxstudy.probes.histogram_bins import bin_edges

MXFP8 = PRECISIONS["mxfp8"]
TOKENS = torch.zeros(1, 1, dtype=torch.int64)
VIEW = StepView(0, lambda: torch.ones(2), torch.nn.Identity(), lambda: (TOKENS, TOKENS), TOKENS.numel())


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fused(norm):
    torch.nn.init.constant_(norm.weight, 3.0)
    linear = NormLinear(norm, 32, 0.02)
    linear.gemms = MXFP8.filled(BlockCast())
    return linear


def test_bin_edges_ascend_and_are_symmetric():
    edges = bin_edges()
    assert (np.diff(edges) > 0).all()
    assert np.array_equal(edges, -edges[::-1])
    assert math.isinf(edges[-1])


def test_the_output_of_a_folded_norm_is_the_quantised_operand_without_the_gain():
    x = gaussian(8, 64)
    norm = MXNorm(64, p=2.0)
    expected = fake_quantize(x * norm.rms(x).reciprocal(), "E4M3")
    assert torch.equal(norm_output(fused(norm), x), expected)


def test_the_output_of_an_unfolded_norm_is_not_quantised_before_its_gain():
    x = gaussian(8, 64)
    assert torch.allclose(norm_output(fused(RMSNorm(64)), x), x / x.square().mean(-1, keepdim=True).sqrt(), rtol=1e-4)


def test_norm_output_rms_is_over_all_micro_batches():
    probe = NormOutputRMS(config.NormOutputRMS(every_steps=1))
    linear, parts = fused(MXNorm(64, p=1.0)), [gaussian(4, 64, seed=s) * (1 + s) for s in range(3)]
    for part in parts:
        probe.watch("layers.0.ffn_norm", linear, part)
    values = values_of(probe.measure(VIEW))
    whole = norm_output(linear, torch.cat(parts))
    assert values["layers.0.ffn_norm/rms"] == pytest.approx(whole.square().mean().sqrt().item(), rel=1e-6)
    assert values["layers.0.ffn_norm/rms_true"] == pytest.approx(1.0, rel=1e-4)
    assert probe.mean_squares == {}


def test_histograms_count_every_element_once_in_its_bin():
    probe = ActivationHistograms(config.ActivationHistograms(every_steps=1))
    x = torch.cat((gaussian(1, 60), torch.tensor([[0.0, 1e-9, 1e6, -1e6]])), dim=1)
    for _ in range(2):
        probe.watch("norm", RMSNorm(64), x)
    values = probe.measure(VIEW)
    expected, _ = np.histogram(x.numpy(), bin_edges())
    assert values["norm/input"] == (2 * expected).tolist()
    assert sum(values["norm/output"]) == 2 * 64
    assert values["norm/input"][0] == values["norm/input"][-1] == 2  # beyond the largest finite edge
    assert values["norm/bound"] == 8.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bins_are_those_of_numpy_at_their_edges_too(dtype):
    edges = torch.from_numpy(bin_edges()[1:-1])
    powers_of_two = edges[edges.abs().log2() % 1 == 0]
    ends = torch.tensor([0.0, -0.0, 2.0**-130, -(2.0**-130), 3e38, -3e38, math.inf, -math.inf])
    x = torch.cat((gaussian(1000) * 10, gaussian(200).exp(), powers_of_two, ends)).to(dtype)[None]
    assert len(powers_of_two) == 2 * 29
    expected, _ = np.histogram(x.double().numpy(), bin_edges())
    assert count_bins(x).tolist() == expected.tolist()


def test_what_is_not_a_number_is_counted_outermost():
    counts = count_bins(torch.tensor([[math.nan, -math.nan, 1.0]]))
    assert counts[0] + counts[-1] == 2
    assert counts.sum() == 3


FUNCTIONS = [mean_squares, input_and_output_counts]
NORMS = [MXNorm(128, p=2.0), RMSNorm(128), LayerNorm(128)]


@pytest.mark.parametrize(  # one runs with the oldest torch, whose compiler takes less
    ("function", "norm"), slow_but([(FUNCTIONS[0], NORMS[0])], itertools.product(FUNCTIONS, NORMS))
)
def test_compiled_for_a_gpu_it_is_one_graph_a_norm_and_the_same(function, norm):
    """It is one graph for any number of linears, because a graph for each would exceed the compiler's limit."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.nn.init.ones_(norm.weight)
    x = gaussian(2, 64, 128).bfloat16()
    for out_features in (32, 64, 96):
        linear = NormLinear(norm, out_features, 0.02)
        linear.gemms = MXFP8.filled(BlockCast())  # not the same object
        torch.testing.assert_close(compiled(function)(linear, x), function(linear, x), rtol=1e-6, atol=0)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize(("p", "bound"), [(1.0, 132.95), (2.0, 17.06)])
def test_the_bound_is_the_papers(p, bound):
    """MXNorm paper, section 4.2: width 1024, blocks of 16."""
    assert MXNorm(1024, p=p, block_size=16).bound == pytest.approx(bound, abs=0.02)


def test_a_bare_linear_is_not_taken_for_a_norm():
    with pytest.raises(AssertionError):
        norm_output(MXLinear(64, 32, 0.02), gaussian(2, 64))


def test_a_layer_norm_is_seen_less_its_mean_and_is_exact():
    probe = NormOutputRMS(config.NormOutputRMS(every_steps=1))
    x = gaussian(16, 64) + 5
    probe.watch("norm", LayerNorm(64), x)
    values = values_of(probe.measure(VIEW))
    expected = torch.nn.functional.layer_norm(x, (64,)).square().mean().sqrt().item()
    assert values["norm/rms"] == pytest.approx(expected, rel=1e-6)
    assert values["norm/rms_true"] == pytest.approx(values["norm/rms"], rel=1e-6)

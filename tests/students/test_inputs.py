"""Counted normals have the right bits and distribution, and depend on what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mxstudy.config import StudentTeacher
from mxstudy.data.permutation import mix
from mxstudy.reader import ConfigError
from mxstudy.students.inputs import STREAMS, gaussian_samples, label_noise, mix_bits, student_inputs

CPU = torch.device("cpu")


def test_the_bits_are_those_of_splitmix64() -> None:
    numbers = np.concatenate([np.arange(1000), np.arange(-1000, 0), [2**62, 2**31, -(2**63)]])
    assert np.array_equal(mix_bits(torch.tensor(numbers)).numpy().view(np.uint64), mix(numbers.view(np.uint64)))


def test_they_are_normal() -> None:
    """A million numbers have the moments of a normal distribution within four standard errors.

    Kolmogorov and Smirnov's distance is below its 0.1 % point.
    """
    z = gaussian_samples(3, "inputs", 17, (1000, 1000)).double().flatten().numpy()
    for power, variance in ((1, 1), (2, 2), (3, 15), (4, 96)):
        expected = {1: 0, 2: 1, 3: 0, 4: 3}[power]
        assert abs((z**power).mean() - expected) < 4 * (variance / len(z)) ** 0.5
    assert stats.kstest(z, "norm").statistic < 1.95 / len(z) ** 0.5
    assert 4.3 < abs(z).max() < 6


def test_neighbours_steps_streams_and_seeds_are_independent() -> None:
    base = gaussian_samples(0, "inputs", 0, (512, 512)).flatten()
    others = [
        base.roll(1),
        base.roll(512),
        gaussian_samples(0, "inputs", 1, (512, 512)).flatten(),
        gaussian_samples(1, "inputs", 0, (512, 512)).flatten(),
        gaussian_samples(-1, "inputs", 0, (512, 512)).flatten(),
        *(gaussian_samples(0, stream, 0, (512, 512)).flatten() for stream in STREAMS[1:]),
    ]
    for other in others:
        for f in (lambda t: t, torch.square):
            assert abs(torch.corrcoef(torch.stack((f(base), f(other))))[0, 1]) < 5 / 512


def test_a_step_counted_on_the_device_is_the_step() -> None:
    assert torch.equal(gaussian_samples(5, "noise", 12, (7, 9)), gaussian_samples(5, "noise", torch.tensor(12), (7, 9)))


def test_a_smaller_batch_is_the_beginning_of_a_larger() -> None:
    assert torch.equal(student_inputs(0, 3, 64, 96, CPU)[:32], student_inputs(0, 3, 32, 96, CPU))


def test_label_noise_has_the_deviation_of_the_papers_code() -> None:
    noise = label_noise(0, 0, 256, 256, CPU, StudentTeacher.label_noise, "noise")
    assert noise.std().item() == pytest.approx(0.005, rel=0.02)
    assert torch.equal(label_noise(0, 0, 256, 256, CPU, 0.01, "noise"), 2 * noise)
    assert noise.dtype == student_inputs(0, 0, 4, 4, CPU).dtype == torch.float32


def test_an_unknown_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="stream: 'input' is not one of inputs, noise, validation"):
        gaussian_samples(0, "input", 0, (1,))


@pytest.mark.slow
def test_compiled() -> None:
    """All steps share one graph, within what logarithm and cosine of another library may differ."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda step: gaussian_samples(3, "inputs", step, (64, 64)), fullgraph=True)
    for step in (0, 5):
        torch.testing.assert_close(
            compiled(torch.tensor(step)), gaussian_samples(3, "inputs", step, (64, 64)), rtol=1e-6, atol=1e-7
        )

"""The MX all-gather over two real processes, and what it refuses.

The ranks are started once; each does all of the work below and leaves what it saw in a file, which the tests read.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from each import each
from torch import zeros

from mxstudy.numerics import quantize
from mxstudy.numerics.cast import Quantized
from mxstudy.numerics.gather import all_gather_mx
from mxstudy.reader import ConfigError

RANKS = 2
TIMEOUT_S = 120
HEADER_BYTES = 32  # dimensions, rows and columns of one shard, and whether it can be quantised, int64


@dataclass(frozen=True)
class Case:
    fmt: str
    axis: int
    rows: int = 64  # of a shard
    columns: int = 96
    dtype: torch.dtype = torch.float32
    block_size: int = 32
    scale_rule: str = "rceil"
    rounding: str = "even"

    def tensor(self) -> torch.Tensor:
        """All rows, over many binades; a NaN, an infinity, a zero block, a -0."""
        generator = torch.Generator().manual_seed(self.rows + self.columns)
        x = torch.randn(RANKS * self.rows, self.columns, generator=generator)
        x *= 2.0 ** torch.randint(-20, 20, x.shape, generator=generator)
        x[1, 2], x[-1, -1], x[2, 0] = torch.nan, -torch.inf, -0.0
        x[self.rows :, 32:64] = 0
        return x.to(self.dtype)

    def shard(self, rank: int) -> torch.Tensor:
        return self.tensor().chunk(RANKS)[rank]

    @property
    def options(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "scale_rule": self.scale_rule, "rounding": self.rounding}

    @property
    def element_bytes(self) -> float:
        return 0.5 if self.fmt == "E2M1" else 1.0


CASES = [
    *(Case(fmt, axis) for fmt in ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1") for axis in (-1, 0)),
    Case("E4M3", -1, rows=3),
    Case("E2M1", 0, rows=32, dtype=torch.bfloat16),
    Case("E5M2", 1, block_size=16, scale_rule="floor", rounding="away"),
    Case("E2M1", -2, rows=16, columns=70, block_size=16, scale_rule="even"),
]
REFUSED = {  # shards of rank 0 and rank 1, the axis, what both ranks say
    "rows": (zeros(64, 64), zeros(32, 64), -1, "shards differ: [64, 64] on rank 0, [32, 64] on rank 1"),
    "columns": (zeros(32, 64), zeros(32, 96), 0, "shards differ: [32, 64] on rank 0, [32, 96] on rank 1"),
    "dimensions": (zeros(64, 64), zeros(2, 32, 64), -1, "3 dimension(s) on rank 1; give [rows, columns]"),
    "no dimension": (zeros(()), zeros(64, 64), -1, "0 dimension(s) on rank 0; give [rows, columns]"),
    "dtype": (zeros(64, 64), zeros(64, 64).double(), -1, "dtype: rank 1's cannot be quantised"),
    "one rank's rows alone are no blocks": (zeros(32, 64), zeros(48, 64), 0, "shards differ"),
    "no rank's rows are blocks": (
        zeros(48, 64),
        zeros(48, 64),
        0,
        "48 rows a rank; blocks along the rows need a multiple of 32",
    ),
    "no rank's columns are blocks": (zeros(32, 48), zeros(32, 48), -1, "32 does not divide axis 1 of shape [32, 48]"),
}


# ------------------------------------------------------------------------------------------------------------ a rank


def work(rank: int, backend: str, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    gathered = [gather_and_count(case, case.shard(rank).to(device)) for case in CASES]
    refused = {name: refusal(shards[rank], axis, device) for name, (*shards, axis, _) in REFUSED.items()}
    groups = [dist.new_group([0]), dist.new_group([1])]
    alone = Case("E4M3", 0)
    own = all_gather_mx(alone.shard(rank).to(device), "E4M3", 0, group=groups[rank])
    other = refusal(zeros(32, 32), 0, device, groups[1 - rank])
    seen = {"gathered": gathered, "refused": refused, "own": parts(own), "other": other}
    torch.save(seen, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def gather_and_count(case: Case, shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """What is gathered, and the bytes of this rank that went through the collective, by dtype."""
    sent: dict[str, int] = {}

    def counted(output: torch.Tensor, local: torch.Tensor, **arguments: Any) -> object:
        assert output.nbytes == RANKS * local.nbytes
        sent[str(local.dtype)] = sent.get(str(local.dtype), 0) + local.nbytes
        return gather(output, local, **arguments)

    gather = dist.all_gather_into_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", counted)
        return parts(all_gather_mx(shard, case.fmt, case.axis, **case.options)), sent


def refusal(shard: torch.Tensor, axis: int, device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    try:
        all_gather_mx(shard.to(device), "E4M3", axis, group)
    except ConfigError as error:
        return str(error)
    return None


def parts(quantized: Quantized) -> tuple[torch.Tensor, ...]:
    """Codes, scales, the decoded bits of all that is not NaN and where NaN is."""
    decoded = quantized.dequantize()
    bits = decoded.masked_fill(decoded.isnan(), 0).view(torch.int32)
    return tuple(t.cpu() for t in (quantized.codes, quantized.scales, bits, decoded.isnan()))


# --------------------------------------------------------------------------------------------------------- two ranks


two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=two_gpus)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, request.param, folder)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]


@pytest.mark.integration
@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_equals_gathering_first_and_casting_after(ranks: list[dict[str, Any]], number: int) -> None:
    case = CASES[number]
    want = parts(quantize(case.tensor(), case.fmt, axis=case.axis, **case.options))
    for rank in ranks:
        got, _ = rank["gathered"][number]
        assert [t.dtype for t in got] == [torch.uint8, torch.uint8, torch.int32, torch.bool]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.integration
@each("number", range(len(CASES)), ids=map(str, CASES))
def test_one_byte_an_element_and_the_scales_are_sent(ranks: list[dict[str, Any]], number: int) -> None:
    case = CASES[number]
    elements = case.rows * case.columns
    for rank in ranks:
        _, sent = rank["gathered"][number]
        assert sent == {
            "torch.uint8": elements * case.element_bytes + elements // case.block_size,
            "torch.int64": HEADER_BYTES,
        }


@pytest.mark.integration
@each("name", REFUSED)
def test_both_ranks_refuse_and_neither_waits_for_the_other(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert REFUSED[name][-1] in rank["refused"][name]


@pytest.mark.integration
def test_a_group_of_some_ranks(ranks: list[dict[str, Any]]) -> None:
    case = Case("E4M3", 0)
    for number, rank in enumerate(ranks):
        want = parts(quantize(case.shard(number), "E4M3", axis=0))
        assert all(torch.equal(a, b) for a, b in zip(rank["own"], want, strict=True))
        assert rank["other"] == "group: this rank is not in it; call it on the group's ranks only"


# ---------------------------------------------------------------------------------------------------------- one rank


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"not initialised; call torch\.distributed\.init_process_group"):
        all_gather_mx(torch.zeros(32, 32), "E4M3", -1)


@each(
    ("shape", "arguments", "message"),
    [
        ((32, 32), ("E4M4", -1), "did you mean 'E4M3'"),
        ((32, 32), ("NVFP4", -1), "NVFP4 has a tensor scale"),
        ((2, 32, 32), ("E4M3", -1), r"3 dimension\(s\) on rank 0; give \[rows, columns\]"),
        ((32, 32), ("E4M3", 2), r"axis: 2 is not an axis of shape \[32, 32\]"),
        ((40, 32), ("E4M3", 0), "40 rows a rank; blocks along the rows need a multiple of 32"),
        ((32, 40), ("E4M3", -1), r"32 does not divide axis 1 of shape \[32, 40\]"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_bad_input(shape: tuple[int, ...], arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        all_gather_mx(torch.zeros(shape), *arguments)


@pytest.mark.usefixtures("alone")
def test_no_gradient_flows() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    assert not all_gather_mx(x, "E4M3", -1).dequantize().requires_grad

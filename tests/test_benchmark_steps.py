"""Benchmarks of a step and of its parts run small on CPU, and leave a table and JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import gang
import pytest
import torch

from analysis.recipe import train_step_cost
from benchmarks import (
    all_gather,
    experts,
    gpu_log,
    head_loss,
    inductor,
    operands,
    parts,
    scaling,
    side_by_side,
    student_teacher,
    train_step,
    training,
)
from benchmarks.kept import Kept
from mxstudy import results
from mxstudy.train.runtime import configure_torch

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("figure_rules", "few_steps")]


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a step a round after one step, which is enough where nothing is compiled."""
    monkeypatch.setattr(train_step, "WARMUP_ROUNDS", 1)
    monkeypatch.setattr(train_step, "STEPS_A_ROUND", 1)


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the tiny models one block of their three."""
    for module in (train_step, experts):
        monkeypatch.setattr(module, "model_of", lambda name: replace(training.model_of(name), num_layers=1))


@pytest.mark.slow
def test_student_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--size",
        "tiny",
        "--replicas",
        "1",
        "3",
        "--teachers",
        "code",
        "paper",
        "--steps",
        "20",
        "--seconds",
        "0.1",
    ]
    student_teacher.main([*words, "--json", str(tmp_path / "student.json")])
    written = json.loads((tmp_path / "student.json").read_text())
    assert [(row["teacher"], row["replicas"]) for row in written["rows"]] == [
        *(("code", 1), ("code", 3), ("paper", 1), ("paper", 3))
    ]
    for row in written["rows"]:
        assert min(row["study"], row["eager"], row["ceiling"]) > 0
        assert row["of_ceiling"] == pytest.approx(row["study"] / row["ceiling"])
        assert (row["equal_steps"], row["largest_difference"]) == (20, 0)  # on CPU a replica is the student alone
    assert "of_ceiling" in capsys.readouterr().out


@pytest.mark.slow
def test_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every part is in the JSON, by our kernel or as we call PyTorch, and beside another way if there is one."""
    words = ["--model", "llama_tiny", "--sequences", "2", "--length", "64", "--seconds", "0.01", "--device", "cpu"]
    parts.main([*words, "--json", str(tmp_path / "parts.json")])
    written = json.loads((tmp_path / "parts.json").read_text())
    of: dict[str, list[str]] = {}
    for row in written["rows"]:
        of.setdefault(row["part"], []).append(row["by"])
        assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e6)
        assert row["of_copy"] > 0
    kernels = [f"{part} backward, {cast}" for part in ("swiglu", "rotary") for cast in ("bf16", "both casts")]
    weights = {"clip": ["torch's, ours", "one after another"], "adamw": ["fused, ours", "foreach"]}
    weights["embedding gradient"] = ["torch's, ours"]
    kernels += ["norm forward", "norm backward", "rotary forward", "cross-entropy"]
    assert of == {part: ["inductor", "ours"] for part in kernels} | weights
    assert written["settings"] == {"model": "llama_tiny", "tokens": 128, "length": 64, "device": "cpu"}
    assert "of_copy" in capsys.readouterr().out


@pytest.mark.slow
def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama_tiny", "--batch", "2", "--sequence", "64", "--seconds", "0.5", "--eager"]
    words += ["--runs", "1", "2", "--sharing", "slices", "--device", "cpu", "--json", str(tmp_path / "side.json")]
    side_by_side.main([*words, "--deterministic"])
    written = json.loads((tmp_path / "side.json").read_text())
    assert written["settings"]["deterministic"]
    one, two = written["rows"]
    assert (one["runs"], two["runs"]) == (1, 2)
    assert one["same_bits"]
    assert 0 < two["least_of_one"] <= two["most_of_one"] < two["tokens_per_s"]
    assert two["tokens_per_s"] == pytest.approx(two["least_of_one"] + two["most_of_one"])
    assert "the same bits in all" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_block")
def test_train_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "llama_tiny", "--ffn", "96", "--vocabulary", "64", "--batch", "2", "--sequence", "64"]
    words = [*small, "--seconds", "0.1", "--eager", "--device", "cpu", "--profile"]
    monkeypatch.chdir(tmp_path)
    train_step.main(words)
    written = json.loads((tmp_path / "runs" / "train_step.json").read_text())  # where analysis.figures looks for it
    assert [row["arm"] for row in written["rows"]] == list(train_step.ARMS)
    assert written["rows"][0]["arm"] == written["settings"]["baseline"]
    assert written["rows"][0]["over_bf16"] == 1
    for row in written["rows"]:
        arm = train_step.ARMS[row["arm"]]
        assert row["backend"] == ("fused" if arm.backend == "auto" else "reference")
        assert row["sm_mhz_median"] is None
        assert row["tokens_per_s"] == pytest.approx(2 * 64 / (row["step_ms"] / 1e3))
        assert row["rounds"] >= 3
        assert row["mfu"] is None
        assert written["settings"]["kernels"][row["arm"]][-1]["share"] == 1
        waits = written["settings"]["waits"][row["arm"]]
        assert 0 < waits["busy_ms"] == pytest.approx(waits["step_ms"] - waits["idle_ms"])
    assert (written["settings"]["ffn"], written["settings"]["vocabulary"]) == (96, 64)
    assert written["settings"]["floor_over_bf16"] > 1
    assert "over_bf16" in capsys.readouterr().out
    frame = results.load(["runs/train_step"], "benchmark")
    assert set(frame["setting.ffn"]) == {96}
    assert set(frame["setting.baseline"]) == {train_step.BASELINE}
    times, _ = train_step_cost.draw(frame.assign(peak_over_bf16=1.0)).axes
    (marks,) = times.containers
    drawn = dict(zip((label.get_text() for label in times.get_yticklabels()), marks[0].get_xdata(), strict=True))
    assert drawn == {train_step_cost.STEPS.get(row["arm"], row["arm"]): row["over_bf16"] for row in written["rows"][1:]}


@pytest.mark.slow
def test_recomputed_mlps_have_rows_of_their_own(tmp_path: Path) -> None:
    """With the FLOPs that are computed again, which do not count for MFU."""
    arms = ["bf16, fused, recomputing MLPs", "mxfp8, rmsnorm, recomputing MLPs", "bf16, fused, full checkpointing"]
    small = ["--model", "llama_tiny", "--ffn", "96", "--vocabulary", "64", "--batch", "2", "--sequence", "64"]
    words = [*small, "--seconds", "0.1", "--eager", "--device", "cpu", "--arms", *arms]
    linears = 3 * (3 * 256 * 256 + 3 * 256 * 96) + 64 * 256  # keys and values of half the heads
    flops = 6 * linears + 6 * 3 * 256 * 64
    for asked, blocks in (([], 2), (["--recompute-mlp", "1"], 1)):
        train_step.main([*words, *asked, "--json", str(tmp_path / "recomputed.json")])
        rows = json.loads((tmp_path / "recomputed.json").read_text())["rows"]
        assert [row["recompute_mlp"] for row in rows] == [0, blocks, blocks, 0]
        assert [row["recomputed"] for row in rows[:3]] == pytest.approx([0, *(2 * [blocks * 2 * 256 * 192 / flops])])
        assert rows[3]["recomputed"] == pytest.approx((flops / 3 - 2 * 64 * 256) / flops)


@pytest.mark.slow
def test_nvfp4_is_compared_with_mxfp8_in_one_run(tmp_path: Path) -> None:
    """It is measured with all its parts and without the random ones, in the same fused blocks."""
    of_nvfp4 = [name for name in train_step.ON_REQUEST if name.startswith("nvfp4")]
    arms = [train_step.MXFP8, *of_nvfp4]
    small = ["--model", "llama_tiny", "--ffn", "96", "--vocabulary", "64", "--batch", "2", "--sequence", "64"]
    words = [*small, "--seconds", "0.1", "--eager", "--device", "cpu", "--arms", *arms]
    train_step.main([*words, "--json", str(tmp_path / "fp4.json")])
    rows = {row["arm"]: row for row in json.loads((tmp_path / "fp4.json").read_text())["rows"]}
    assert list(rows) == [train_step.BASELINE, *arms]
    assert {row["backend"] for row in rows.values()} == {"fused"}
    assert rows[train_step.MXFP8]["over_mxfp8"] == 1
    assert all(row["over_mxfp8"] > 0 for row in rows.values())
    whole, without = (train_step.precision_of(train_step.ALL_ARMS[arm]).recipe("nvfp4") for arm in of_nvfp4)
    assert (whole.dgrad_dh.rounding, without.dgrad_dh.rounding) == ("stochastic", "even")
    assert whole.wgrad_transform is not None
    assert without.wgrad_transform is None


@pytest.mark.slow
@pytest.mark.usefixtures("one_block")
def test_experts(tmp_path: Path) -> None:
    small = ["--model", "moe_tiny", "--batch", "1", "--sequence", "32", "--seconds", "0", "--eager", "--device", "cpu"]
    experts.main([*small, "--profile", "--json", str(tmp_path / "experts.json")])
    content = json.loads((tmp_path / "experts.json").read_text())
    rows = {row["arm"]: row for row in content["rows"]}
    assert content["settings"]["kernels"].keys() == {
        name for name, one in experts.CONTENDERS.items() if not one.is_loop
    }
    assert rows.keys() == experts.CONTENDERS.keys()
    assert rows["dense, mxfp8"]["mfu_over_dense"] == 1
    for row in rows.values():
        assert row["active_over_dense"] == pytest.approx(1, abs=0.05)
        assert row["mfu_over_dense"] > 0
        assert (row["kernels_ms"] is None) == experts.CONTENDERS[row["arm"]].is_loop


def test_operands(tmp_path: Path) -> None:
    path = tmp_path / "operands.json"
    operands.main([*["--rows", "256", "--columns", "128", "--seconds", "0", "--device", "cpu", "--json"], str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["over_copy"] for row in rows if row["operand"] == "copy"] == [1, 1]
    assert {row["operand"] for row in rows} >= operands.OF_X.keys() | operands.OF_WEIGHT.keys() | {"NVFP4, both"}


def test_head_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks have the loss and gradients of whole logits."""
    monkeypatch.setattr(head_loss, "AT_ONCE", [2**12, 2**13])
    path = tmp_path / "head_loss.json"
    words = ["--tokens", "64", "--hidden", "32", "--vocabulary", "256", "--seconds", "0", "--device", "cpu", "--eager"]
    head_loss.main([*words, "--json", str(path)])
    rows = {row["arm"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() >= {"whole, eager", "chunks of 2^12", "chunks of 2^13"}
    assert rows["whole, eager"]["over_whole"] == 1
    for arm, row in rows.items():
        if arm.startswith("chunks"):
            assert row["loss_error"] == row["dx_error"] == 0
            assert row["dw_error"] < 1e-3
        assert row["over_floor"] > 0


def test_bytes_of_a_step() -> None:
    """At width 512, depth 4, batch 2048, by hand in MB: 37.7 at the hidden size, 58.7 inside, 62.9 of weights."""
    run = student_teacher.configured("paper", 1, "code", 10)
    layer = 36 * 2048 * 512 + 14 * 2048 * 2048 + 30 * 2 * 512 * 2048
    assert student_teacher.moved_bytes(run) == 4 * layer
    assert layer == pytest.approx(159.4e6, rel=1e-3)


def test_bytes_that_casts_add() -> None:
    """For 1B, FFN 3072, 32768 tokens, by hand: 59 kB per block and token."""
    model = replace(training.model_of("llama_1b"), ffn_size=3072)
    block = 32768 * 2 * (10 * 2048 + 3072 + 6144)
    assert train_step.more_bytes(model, 32768) == 16 * block
    assert 16 * block == pytest.approx(31.1e9, rel=1e-2)


NVIDIA_SMI = """#!/bin/sh
echo "$@" > words
echo 1980, 100.50, 40
while true; do echo "1400, 690.25, 61"; echo "1500, 695.00, 62"; echo "[N/A], 1, 2"; sleep 0.01; done
"""


def test_clock_power_and_temperature_beside_a_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="3-14"))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    with gpu_log.GpuLog(torch.device("cuda")) as log:
        time.sleep(0.1)
        began_s = time.perf_counter()
        time.sleep(0.3)
        spans = [gpu_log.Span(began_s, time.perf_counter())]
    row = log.over(spans)
    assert (row["sm_mhz_min"], row["sm_mhz_max"]) == (1400, 1500)
    assert (row["power_w_min"], row["temperature_c_max"]) == (690.25, 62)
    assert gpu_log.shown({"arm": "bf16"} | row)["temperature_c"].endswith(" / 62")
    assert "-i GPU-3-14 --query-gpu=clocks.sm,power.draw.instant,temperature.gpu" in (tmp_path / "words").read_text()
    assert set(log.over([]).values()) == {None}
    tool.write_text("#!/bin/sh\necho Field is not a valid field to query.\n")
    with pytest.raises(RuntimeError, match=r"nvidia-smi gives no clocks.sm, .*: Field is not a valid"):
        gpu_log.GpuLog(torch.device("cuda")).__enter__()


def as_installed_and_with_roundings() -> None:
    class Rounds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1.0001).to(torch.bfloat16).float() * 3

    own, x = inductor.OwnSettings(), torch.randn(1024)
    configure_torch(compile=True)
    before, dropped, after = Rounds(), Rounds(), Rounds()
    rounded = after(x)
    before.compile(fullgraph=True)
    assert torch.equal(before(x), rounded)
    own.compile(dropped)
    with own.on():
        assert torch.equal(dropped(x), x * 1.0001 * 3)
    after.compile(fullgraph=True)
    assert torch.equal(after(x), before(x))
    assert torch.equal(after(x), rounded)
    assert not torch.equal(dropped(x), rounded)
    with pytest.raises(RuntimeError, match="Inductor keeps roundings already"):
        inductor.OwnSettings()


@pytest.mark.slow
def test_one_arm_has_the_compiler_as_it_is_installed_and_the_others_keep_roundings() -> None:
    process = forked.context().Process(target=as_installed_and_with_roundings)
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback is in what was captured of stderr"


def test_recomputing_keeps_products_and_changes_no_gradient() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x, seen = torch.randn(4, 8), []
    gradients = []
    for recomputes in (False, True):
        block = torch.nn.Module()
        block.forward = lambda x: seen.append(len(seen)) or torch.nn.functional.silu(x @ weight).square() @ weight
        if recomputes:
            inductor.recompute_between_products(block)
        gradients += torch.autograd.grad(block(x).sum(), weight)
    assert torch.equal(*gradients)
    assert len(seen) == 3  # the second once more in its backward


@pytest.mark.slow
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch-size", "2", "--micro-batch-size", "1", "--sequence-length", "64", "--steps", "2", "--eager"]
    words = ["--model", "llama_tiny", "--gpus", "1", "2", "--device", "cpu", "--warmup-steps", "1", *small]
    scaling.main([*words, "--precisions", "mxfp8", "--json", str(tmp_path / "scaling.json")])
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["provenance"]["torch"]
    one, two = written["rows"]
    assert [row["gpus"] for row in written["rows"]] == [1, 2]
    for row in written["rows"]:
        assert row["tokens_per_s_a_gpu"] == pytest.approx(2 * 64 / (row["step_ms"] / 1e3))
        assert row["efficiency"] == pytest.approx(row["tokens_per_s_a_gpu"] / one["tokens_per_s_a_gpu"])
        assert row["peak_gib"] > 0
        assert row["mfu"] is None
        assert row["backend"] == "fused"
    assert two["loss"] == pytest.approx(one["loss"], abs=0.5)
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.slow
def test_all_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """There are 1.03 bytes per parameter and direction. A norm's gain travels beside them in bf16.

    The ranks are forked, which imports nothing anew. test_scaling starts them by torchrun.
    """

    def run_case(case: all_gather.Case, module: str) -> dict[str, Any]:
        folder = tmp_path / case.all_gather
        words = ["--work", json.dumps(asdict(case)), str(folder / "row.json")]
        gang.together(folder, case.gpus, importlib.import_module(module).main, words)
        return json.loads((folder / "row.json").read_text())

    monkeypatch.setattr(scaling, "run_case", run_case)
    small = ["--batch-size", "2", "--micro-batch-size", "1", "--sequence-length", "64", "--steps", "1"]
    words = ["--model", "llama_tiny", "--device", "cpu", "--warmup-steps", "1", "--deterministic", *small]
    all_gather.main([*words, "--json", str(tmp_path / "all_gather.json")])
    without, gathered = json.loads((tmp_path / "all_gather.json").read_text())["rows"]
    assert [row["all_gather"] for row in (without, gathered)] == ["compute", "mx"]
    assert without["loss"] == gathered["loss"]
    for direction in all_gather.DIRECTIONS:
        assert without[f"{direction}_bytes_a_parameter"] == 2
        assert gathered[f"{direction}_bytes_a_parameter"] == pytest.approx(1 + 1 / 32, abs=2e-3)
        assert gathered[f"{direction}_bytes"] / without[f"{direction}_bytes"] == pytest.approx(33 / 64, abs=1e-3)
    assert "forward_bytes_a_parameter" in capsys.readouterr().out


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call tries it again, and measures nothing else twice."""
    ran: list[tuple[int, bool]] = []

    def run_case(case: scaling.Case) -> dict[str, Any]:
        ran.append((case.gpus, full))
        if full and case.gpus == 1:
            raise subprocess.CalledProcessError(137, "torchrun")
        return asdict(case) | {"tokens_per_s_a_gpu": 5.0 + case.gpus}

    def measured() -> dict[int, dict[str, Any]]:
        cases = [scaling.Case("llama_tiny", "bf16", gpus, 1, 1, 64, 1, 1, "none", False, "cpu") for gpus in (1, 2)]
        rows = scaling.measure(cases, Kept(tmp_path / "scaling.json", torch.device("cpu")))
        return {row["gpus"]: row for row in rows}

    monkeypatch.setattr(scaling, "run_case", run_case)
    full = True
    rows = measured()
    assert "exited with 137" in rows[1]["error"]
    assert rows[2]["efficiency"] is None
    full = False
    rows = measured()
    assert ran == [(1, True), (2, True), (1, False)]
    assert rows[1]["efficiency"] == 1.0
    assert rows[2]["efficiency"] == 7.0 / 6.0

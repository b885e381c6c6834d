"""The pages of results/ say what the tables beside them say, and show images that can be drawn from them."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis.figures import FIGURES, IMAGES
from analysis.ledger.claim import IMPOSSIBLE, NOT_RUN
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR
from analysis.ledger.tables import RESULTS
from analysis.pages import (
    fp4_operands,
    marks,
    mixture_losses,
    mixtures,
    step_cost,
    step_memory,
    step_parts,
    step_profile,
)
from analysis.pages.__main__ import OF_ALL, PAGES, main
from analysis.pages.marks import PART, names, rewritten
from analysis.units import PLAN
from benchmarks.train_step import ARMS, Case
from benchmarks.training import build, model_of

ROOT = Path(__file__).parents[1]
BY_HAND = {"claims"}  # the ledger has a command of its own
PLANS = {"README", "prestated"}  # their tables are an index, and plans, with numbers that come from no run
SLOW = {"olmes"}  # bootstraps
SHOWN = re.compile(r"!\[[^]]*\]\((\w+)\.png\)")

# What looks measured: decimals, percentages, counts of a total, intervals, and numbers with a comma; not 12 or 512.
MEASURED = re.compile(r"[+-]?\d+\.\d+(?:e-?\d+)?|\d+ \.\. \d+|\d+ of (?:the )?\d+|\d+ ?%|\d+,\d{3}")
PROVENANCE = re.compile(r"^## How it was (?:obtained|made)$.*", re.S | re.M)
NO_NUMBERS = re.compile(r"^ {4}.*$|`[^`]*`|\]\([^)]*\)", re.M)  # commands, code, links
OTHER_NUMBERS = re.compile(
    r"""
    (?:torch|torchao|lm-eval)\ [\d.]+                                         # versions
    | (?:[Ss]ections?|appendi(?:x|ces)|[Ff]igures?|Eq\.)\ [\dA-Z.]+(?:,\ [\dA-Z.]+)*  # places in a document
    | [(;]\ ?(?:limits?|target)\b[^);]*                                     # what was to be reached
    | \(the\ paper\b[^)]*\)                                                 # a paper's
    | 9[05]\ %                                                              # levels of intervals
    | [^.]*(?:[.]\d[^.]*)*\bno\ table\ holds\b[^.]*(?:[.]\d[^.]*)*            # what cannot be made anew
    """,
    re.X,
)
SETTINGS = {  # numbers in a page's sentences that say how something was made or counted
    "README": ("0.02", "0.026", "0.1"),
    "approximation": ("1,024", "4,096", "0.99", "0.003"),
    "checkpoint": ("10 %",),
    "data": ("32,000",),
    "findings": ("0.5", "0.005", "9,000"),
    "fp4_recipes": ("0.001", "0.002", "0.003", "0.005"),
    "kernels": ("0.90", "0.95", "4.8", "1,280", "8,192", "4,096", "65,536"),
    "learning_rate_window": ("0.22", "6,500", "7,000", "4,000"),
    "moe": ("0.02", "0.1"),
    "mxnorm_equivalence": ("2.93", "0.026"),
    "olmes": ("2,900",),
    "parts": ("128,256", "32,000", "32,768", "2,048", "1.27", "80 %"),
    "recipe_23m": ("0.5", "0.005"),
    "side_by_side": ("1.7",),
    "shakespeare": ("1.47", "5,000"),
    "spike_proxy": ("30 %", "1,200", "0.4814", "0.4688"),
    "spike_search_23m": ("0.98", "0.999", "1 %"),
    "student_ablations": ("0.22", "-0.22", "0.9", "2,048", "6,000", "8,500", "9,000"),
    "student_figures": ("1 %", "75 %", "0.875", "1,200", "4,800", "8,900", "2,000", "0.5"),
    "student_teacher": ("0.88", "1,000", "1,500", "2,000", "6,500", "8,500", "9,000"),
    "train_step": ("4.8", "32,000"),
}


def page_of(name: str) -> str:
    return (ROOT / RESULTS / f"{name}.md").read_text()


@pytest.mark.integration
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PAGES])
def test_a_page_is_what_its_tables_say(name: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    page = page_of(name)
    for match in PART.finditer(page):
        (again,) = PART.finditer(rewritten(match[0], PAGES[name]))
        assert match["made"] == again["made"], f"results/{name}.md, {match['name']}: run make pages"


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OF_ALL])
def test_every_part_is_on_its_page(name: str) -> None:
    index = {part.removeprefix(f"{name}: ") for part in names(page_of("README")) if part.startswith(f"{name}: ")}
    assert {*names(page_of(name))} | index == {*PAGES[name]}


def test_every_page_is_made_from_tables() -> None:
    pages = {path.stem for path in (ROOT / RESULTS).glob("*.md")} - BY_HAND
    assert pages == {*PAGES}
    for name in pages - PLANS:
        prose = PART.sub("", page_of(name))
        assert not [line for line in prose.splitlines() if line.startswith("|")], f"{name}: a table without a mark"


def typed(page: str) -> list[str]:
    """Return the numbers of a page that look measured and are not made from a table."""
    prose = NO_NUMBERS.sub("", PART.sub("", PROVENANCE.sub("", page)))
    return MEASURED.findall(OTHER_NUMBERS.sub("", " ".join(prose.split())))


def test_a_mixtures_pairs_differ_in_percent_of_the_loss() -> None:
    """Print 2 % for a loss of 102 against 100, whose difference of logarithms is 0.0198."""
    assert mixture_losses.percent(math.log(1.02)) == "+2.00 %"


@pytest.mark.parametrize("name", sorted({*PAGES} - {"prestated"}))
def test_no_number_of_a_sentence_is_typed(name: str) -> None:
    assert {*typed(page_of(name))} == {*SETTINGS.get(name, ())}, "mark it, or name it among the settings"


def test_each_finding_stands_on_rows_that_are_decided_as_it_says() -> None:
    verdicts = {row["id"]: row["verdict"] for row in json.loads((ROOT / RESULTS / "claims.json").read_text())}
    _, *sections = page_of("findings").split("\n## ")
    decided, known = {REPRODUCED, CONTRADICTED}, set[str]()
    for title, _, section in (section.partition("\n") for section in sections):
        sentences = section.strip().split("\n- ")
        named = [re.findall(r"\[([^]]*)\]\((\w+)\.md\)", sentence) for sentence in sentences]
        assert all(named), f"{title}: a finding without a row or a page"
        for name, page in itertools.chain(*named):
            assert page == "claims" or page == name
            known |= {name} if page == "claims" else set()
            allowed = {UNCLEAR, NOT_RUN, IMPOSSIBLE} if title == "Not known" else decided
            assert page != "claims" or verdicts[name] in allowed, f"{title}: {name} is {verdicts[name]}"
    assert len(known) > 20


def test_what_is_typed_is_seen() -> None:
    made = "<!-- from: a -->7.5<!-- end --> and `lr=0.1` ([text](0.3.md), torch 2.11.0, section 3.5; limit: 1.06)"
    said = "rates were 0.7, of another call, which no table holds. In (the paper: 3.1) 95 % is\n\n    python 0.4"
    assert typed(f"{made}. Elsewhere {said}\n\n## How it was obtained\nIt took 1,220 s.") == []
    assert typed("4 of 21 end 0.5 .. 0.7 lower, by 12 %, -0.23 (at 7,299)") == [
        "4 of 21",
        "0.5",
        "0.7",
        "12 %",
        "-0.23",
        "7,299",
    ]


def test_every_image_is_on_a_page_and_can_be_drawn() -> None:
    shown = [image for path in (ROOT / RESULTS).glob("*.md") for image in SHOWN.findall(path.read_text())]
    assert sorted(shown) == sorted(path.stem for path in (ROOT / RESULTS).glob("*.png")) == sorted(IMAGES)
    figures = {figure.name: figure for figure in FIGURES}
    for name in IMAGES.values():
        assert figures[name].backing()
        assert all((ROOT / path).exists() for path in figures[name].backing())


def test_the_command_writes_what_differs_and_nothing_else(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "results").mkdir()
    page = "Prose 7.\n\n<!-- from: jobs -->\n| a |\n<!-- end -->\nIn <!-- from: values -->1 s<!-- end -->."
    measured = (ROOT / "results" / "launch.json").read_text()
    for name, text in {"launch.md": page, "data.md": "No part.", "launch.json": measured}.items():
        (tmp_path / "results" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "data"]) == 0
    assert capsys.readouterr().out == "results/launch.md\n"
    written = (tmp_path / "results" / "launch.md").read_text()
    assert written.startswith("Prose 7.\n\n<!-- from: jobs -->\n| jobs | vary in |")
    values = next(row for row in json.loads(measured)["rows"] if row["vary_in"] == "values")
    said = f"{values['fastest_s']:.1f} to {values['slowest_s']:.1f} s"
    assert written.endswith(f"\n<!-- end -->\nIn <!-- from: values -->{said}<!-- end -->.")
    assert main(["launch"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!-- from: a -->1", "each <!-- from: NAME --> needs one <!-- end -->"),
        ("1<!-- end -->", "each <!-- from: NAME --> needs one <!-- end -->"),
        ("<!-- from: b -->1<!-- end -->", "from: b: no such part of this page; choose from a"),
    ],
)
def test_a_mark_that_is_wrong_is_refused(page: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        rewritten(page, {"a": lambda: "2"})
    assert rewritten("<!-- from: a -->1<!-- end -->", {"a": lambda: "2"}) == "<!-- from: a -->2<!-- end -->"


@pytest.fixture
def a_step(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a benchmark of llama_125m's step wrote. It is read as a test leaves it."""
    name = step_profile.name_of("llama_125m", "H200")
    written = json.loads((ROOT / RESULTS / f"{name}.json").read_text())

    def read(asked: str) -> dict[str, Any]:
        assert asked == name
        return written

    for module in (marks, step_cost, step_profile):
        monkeypatch.setattr(module, "benchmark", read)
    return written


def test_a_step_beside_its_baseline_and_the_readings_of_its_gpu(a_step: dict[str, Any]) -> None:
    a_step["rows"][1] |= {"over_bf16": 1.041, "over_bf16_spread": 0.02}
    a_step["rows"][1] |= {"sm_mhz_min": 1400, "sm_mhz_median": 1620, "sm_mhz_max": 1980}
    head, _, first, second, *_ = step_cost.steps_in("llama_125m", "train_step_h200_llama_125m").splitlines()
    assert head.count("least / median / largest") == 3
    assert "| bf16, in the same kernels | " in first
    assert first.count("| 1 |") == 2
    assert " 1.041 +- 0.020 |" in second
    assert "| 1400 / 1620 / 1980 |" in second


def test_a_median_decides_whether_a_limit_is_met(a_step: dict[str, Any]) -> None:
    (base, *_), limits = a_step["rows"], {one.said: one for one in step_cost.LIMITS}
    mfu, time = limits["MFU of bf16, llama_125m"], limits["MXFP8 with RMSNorm over bf16, llama_125m"]
    (mxfp8,) = (one for one in a_step["rows"] if one["arm"] == time.arm)
    for value, is_met in ((0.519, False), (0.521, True)):
        base["mfu"] = value
        assert mfu.is_met() is is_met
    for value, is_met in ((1.031, False), (1.029, True)):
        mxfp8["over_bf16"] = value
        assert time.is_met() is is_met
        assert time.met("H200") == ("yes" if is_met else "no")
        assert time.measured("H200").startswith(f"{value} +- ")
    assert time.measured("B200") == "-"


def test_kernels_are_grouped_by_what_they_do(a_step: dict[str, Any]) -> None:
    """SwiGLU's kernels end as those do that only cast, and names of fused kernels contain other kernels' names."""
    names = {
        "activation_backward_cast_both_kernel": "SwiGLU, with casts",
        "cast_both_kernel": "casts alone",
        "triton_poi_fused__to_copy_activation_backward_cast_both_clamp_min_lt_mul": "products times tensor scales",
        "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_splitK_NTN": "GEMMs",
        "Memcpy DtoD (Device -> Device)": step_profile.REST,
    }
    assert {name: step_profile.group_of(name) for name in names} == names
    longest = [{"kernel": name, "calls": 1, "ms": 2.0**i} for i, name in enumerate(names)]
    a_step["settings"]["kernels"]["bf16, fused"] = [*longest, {"kernel": "all", "calls": 9, "ms": 100.0}]
    of = step_profile.ms_of("llama_125m", "bf16, fused")
    assert (of["SwiGLU, with casts"], of["GEMMs"], of[step_profile.REST]) == (1, 8, 100 - 15)
    assert step_profile.kernels_ms("llama_125m", "bf16, fused") == pytest.approx(100)


def test_a_profile_says_how_long_no_kernel_runs_or_else_what_a_step_takes_beyond_its_kernels(
    a_step: dict[str, Any],
) -> None:
    a_step["rows"] = [a_step["rows"][0] | {"step_ms": 120.0}]
    a_step["settings"]["kernels"]["bf16, fused"] = [
        {"kernel": "nvjet", "ms": 90.0},
        {"kernel": "all", "ms": 100.0, "calls": 2},
    ]
    a_step["settings"]["waits"]["bf16, fused"] |= {"step_ms": 112.0, "idle_ms": 12.0}
    shown = step_profile.profile("llama_125m")
    assert "| no kernel runs | 12.0 |\n| the step, as profiled | 112.0 |\n| the step, as timed | 120.0 |" in shown
    assert "the gap" not in shown
    del a_step["settings"]["waits"]
    shown = step_profile.profile("llama_125m")
    assert "| the step, as timed | 120.0 |\n| the gap: step less kernels | 20.0 |" in shown
    assert "no kernel runs" not in shown


def test_what_a_least_mfu_leaves_to_the_parts_of_a_step(a_step: dict[str, Any]) -> None:
    """A step of 200 ms with an MFU of 0.26 has to take 100. Beside 20 ms of others, 120 ms have to take 80."""
    a_step["rows"][0] |= {"step_ms": 200.0, "mfu": 0.26}
    kernels = (("nvjet", 90.0), ("cudnn", 30.0), ("cross_entropy_kernel", 20.0), ("all", 140.0))
    a_step["settings"]["kernels"]["bf16, fused"] = [{"kernel": name, "ms": ms} for name, ms in kernels]
    budget = step_profile.Budget("llama_125m")
    assert budget.tflop == pytest.approx(0.26 * 989 * 0.2)
    assert budget.tflop_of_attention == pytest.approx(6 * 8 * 1024 * 4096 * 65536 / 1e12)
    assert (budget.allowed_ms, budget.busy_ms, budget.rest_ms) == pytest.approx((100, 120, 20))
    assert budget.speedup == pytest.approx(1.5)
    assert budget.cells()["MFU if all but GEMMs and attention took no time"] == f"{0.26 * 200 / 120:.3f}"


def test_the_bytes_of_a_rotary_embedding(a_step: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways queries and keys, 20 heads, are read and written; the backward reads and writes values, 4 more, too."""
    monkeypatch.setattr(step_parts, "benchmark", step_profile.benchmark)
    a_step["settings"] |= {"batch": 1, "sequence": 1000, "copied_bytes_per_s": 1e9}
    bf16 = 1000 * 8 * 64 * 2 * (20 + 20 + 24 + 24)
    assert step_parts.rotary_least_ms(1) == f"{bf16 / 1e6:.2f}"
    assert step_parts.rotary_least_ms(2) == f"{(bf16 + 1000 * 8 * 64 * 2 * 24) / 1e6:.2f}"


def test_a_mixture_beside_a_dense_model_whose_step_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"experts, bf16": (200.0, 20.0), "dense, bf16": (100.0, 25.0)}
    arms = [{"arm": arm, "step_ms": ms, "spread_ms": spread} for arm, (ms, spread) in times.items()]
    monkeypatch.setattr(marks, "benchmark", lambda _: {"rows": [one | {"mfu_over_dense": 0.5} for one in arms]})
    shares = f"{0.5 * 0.75 / 1.1:.2f} to {0.5 * 1.25 / 0.9:.2f}"
    assert mixtures.of_dense_by_spreads("experts, bf16") == shares


def test_a_mixture_beside_a_dense_model_if_the_gpu_waited_for_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixture has kernels in half of its step, the dense model in 0.8 of it: 0.5 * 0.8 / 0.5."""
    times = {"experts, bf16": (200.0, 100.0), "dense, bf16": (100.0, 80.0)}
    arms = [{"arm": arm, "step_ms": ms, "kernels_ms": kernels} for arm, (ms, kernels) in times.items()]
    monkeypatch.setattr(marks, "benchmark", lambda _: {"rows": [one | {"mfu_over_dense": 0.5} for one in arms]})
    assert mixtures.of_dense_without_waiting("experts, bf16") == "0.80"


def test_the_fastest_other_tile_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"inductor": 9.0, "ours": 4.0, "ours, 1 x 8 x 2": 3.0, "ours, 1 x 8 x 4": 5.0}
    found = [{"part": "adamw", "by": by, "us": ms * 1e3, "ms_of_step": ms} for by, ms in times.items()]
    monkeypatch.setattr(marks, "benchmark", lambda _: {"rows": found})
    assert step_parts.other_tiles().splitlines()[2:] == ["| AdamW | 4.00 | 1 x 8 x 2 | 3.00 | 0.75 | 2 |"]


@pytest.mark.parametrize("arm", ["bf16, fused", "mxfp8, rmsnorm"])
def test_the_memory_of_a_step_is_what_the_model_has_and_keeps(arm: str) -> None:
    """A block also keeps its gains in bf16 and the angles of the rotary embedding, whatever the number of tokens."""
    counted = step_memory.Sizes(hidden=256, ffn=512, layers=1, heads=4, kv_heads=1, vocabulary=512, tokens=128)
    own = {"hidden_size": 256, "ffn_size": 512, "num_layers": 1, "num_heads": 4, "num_kv_heads": 1, "vocab_size": 512}
    case = Case(replace(model_of("llama_1b"), **own), 2, 64, compile=False, device="cpu")
    model = build(case.settings(ARMS[arm]), torch.device("cpu")).model
    assert counted.parameters == model.num_params()
    weights, kept = {weight.data_ptr() for weight in model.parameters()}, dict[int, int]()

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept.update({} if storage.data_ptr() in weights else {storage.data_ptr(): storage.nbytes()})
        return x

    x = torch.zeros(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.layers[0](x, model.rope(64, x.device))
    gains, angles = 2 * 2 * 256, 4 * 64 * 32
    assert sum(kept.values()) == counted.other_kept + counted.first_products(1) + gains + angles


def test_what_a_step_holds_is_near_its_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for arm in step_memory.COLUMNS.values():
        peak_gib = marks.row("train_step_h200_llama_1b", arm=arm)["peak_gib"]
        assert peak_gib - 1 < sum(step_memory.of_arm(arm).values()) / 2**30 < peak_gib


def test_linears_that_a_recipe_leaves_in_bf16_are_in_no_mean_by_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, left = {"forward_w": 0.4, "wgrad_x": 0.2}, {"forward_w": 0.3, "wgrad_x": 0.0}
    errors = {"layers.0.attention.wqkv.weight": quantised, "layers.1.feed_forward.w2.weight": left}
    columns = {f"{weight}/{name}/ratio": [value] for weight, of in errors.items() for name, value in of.items()}
    tables = {
        "gradient_bias": pd.DataFrame({"fingerprint": ["a"], "step": [400], **columns}),
        "runs": pd.DataFrame({"fingerprint": ["a"], PLAN: ["nvfp4"]}),
    }
    monkeypatch.setattr(fp4_operands, "rows_of", lambda kind, _: tables[kind])
    (row,) = fp4_operands.means("ratio").to_dict("records")
    assert {name: row[name] for name in quantised} == quantised

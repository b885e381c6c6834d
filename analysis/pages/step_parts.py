"""Make the parts of the page about what a training step does beside its GEMMs, from the JSON of benchmarks.parts.

The casts alone are from that of benchmarks.operands.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from analysis.pages.head_loss import HEAD_LOSS
from analysis.pages.marks import Parts, benchmark, row, rows
from analysis.pages.step_profile import ARMS, BF16, GPU, MODELS, MXFP8, ms_of, name_of, step_ms
from mxstudy.results import markdown

SAID = {  # {part of the benchmark: its name on the page, and the least share of a copy's rate that was wanted}
    "swiglu backward, bf16": ("SwiGLU, backward, bf16", 0.85),
    "swiglu backward, both casts": ("SwiGLU, backward, with both casts", 0.85),
    "norm forward": ("norm of a sum, forward", None),
    "norm backward": ("norm of a sum, backward", None),
    "rotary forward": ("rotary embedding, forward", None),
    "rotary backward, bf16": ("rotary embedding, backward, bf16", None),
    "rotary backward, both casts": ("rotary embedding, backward, with both casts", None),
    "cross-entropy": ("cross-entropy and its gradient", None),
    "clip": ("clipping", 0.80),
    "adamw": ("AdamW", 0.80),
    "embedding gradient": ("embedding's gradient", 0.80),
}
BY = {
    "ours": "our kernel",
    "inductor": "PyTorch, compiled",
    "torch's, ours": "as we call PyTorch",
    "fused, ours": "PyTorch, fused, as we call it",
    "foreach": "PyTorch, foreach",
    "one after another": "PyTorch, tensor by tensor",
}
OURS = [by for by in BY if by.endswith("ours")]
SWIGLU_CASTS = "swiglu backward, both casts"
NEWER_TILES = {SWIGLU_CASTS: "ours, 32 x 64 x 2"}  # {part: the tile of now}, where the H100's run had another as ours
H200, H100 = "parts", "parts_h100"
NEWER, BEFORE = "parts_h100_norms", "parts_h100_before"  # norms and the cross-entropy, and the latter by older code
NORMS = {"H200": "parts_h200_norms", "H100": "parts_h100_norms_llama_125m"}  # with today's tiles
# {(GPU, part): our own tile}, where a run lists it among the others. No table says which tile is ours.
OWN_TILES = {("H100", "norm backward"): "ours, 4 x 1024 x 4"}
CASTS = {"H200": "operands", "H100": "operands_h100"}
HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 64  # of conf/model/llama_125m.yaml
ROTARY_MS = 2.0  # what the rotary embedding of a step of llama_125m was to take at most
VOCABULARY = 128256  # of conf/model/llama_1b.yaml
RATES = ("ms", "TB/s", "TB/s of a copy beside it", "share of the fastest copy")


def table() -> str:
    cells = [
        (
            SAID[one["part"]][0],
            BY[one["by"]],
            *rates(one),
            *((share(one["part"], H100), target(one)) if one["by"] in OURS else ("-", "-")),
        )
        for one in rows(H200)
        if one["by"] in BY
    ]
    columns = ["part of a step of llama_1b, H200", "by", *RATES, "on an H100", "target"]
    return markdown(columns, cells, left=columns[:2])


def rates(one: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row in the columns RATES."""
    return (
        f"{one['ms_of_step']:.2f}",
        f"{one['tb_per_s']:.2f}",
        f"{copied(one):.2f}",
        f"{100 * of_fastest(one):.1f} %",
    )


def target(one: dict[str, Any]) -> str:
    """Return the least share that was wanted, and whether a row has it: '85 %, met'."""
    least = SAID[one["part"]][1]
    return f"{100 * least:.0f} %, {'met' if of_fastest(one) >= least else 'missed'}" if least else "-"


def copied(one: dict[str, Any]) -> float:
    """Return the TB/s of the copy beside a row."""
    return float(one["tb_per_s"] / one["of_copy"])


def fastest_copy(name: str = H200) -> float:
    """Return the TB/s of the fastest of all copies of a run."""
    return max(copied(one) for one in rows(name))


def of_fastest(one: dict[str, Any], name: str = H200) -> float:
    return float(one["tb_per_s"] / fastest_copy(name))


def ours(part: str, name: str = H200) -> dict[str, Any]:
    (found,) = (one for one in rows(name) if one["part"] == part and one["by"] in OURS)
    return dict(found)


def newest(part: str, name: str) -> dict[str, Any]:
    """Return the row of a part as we compute it now."""
    return row(name, part=part, by=NEWER_TILES[part]) if name == H100 and part in NEWER_TILES else ours(part, name)


OTHER_TILE = "ours, "  # how rows of our kernels with other tiles begin, in `by`


def other_tiles(name: str = H200, gpu: str = "H200") -> str:
    """Return the table of our kernels with their tile and with the fastest other one that was tried."""
    cells = []
    for part, (said, _) in SAID.items():
        if others := [one for one in rows(name) if one["part"] == part and one["by"].startswith(OTHER_TILE)]:
            best, own = fastest(others), ours(part, name)
            cells.append(
                (
                    said,
                    f"{own['ms_of_step']:.2f}",
                    best["by"].removeprefix(OTHER_TILE),
                    f"{best['ms_of_step']:.2f}",
                    f"{best['us'] / own['us']:.2f}",
                    len(others),
                )
            )
    columns = [f"part of a step of llama_1b, {gpu}", "our tile, ms", "fastest other", "ms", "over ours", "others tried"]
    return markdown(columns, cells, left=columns[:1])


def norms() -> str:
    """Return the table of the norms' kernels beside what PyTorch compiles and the fastest other tile."""
    cells = []
    for gpu, name in NORMS.items():
        columns = MODELS[benchmark(name)["settings"]["model"]].hidden
        for part in ("norm forward", "norm backward"):
            own, compiled = ours(part, name), row(name, part=part, by="inductor")
            others = [one for one in rows(name) if one["part"] == part and one["by"].startswith(OTHER_TILE)]
            best = fastest([one for one in others if one["by"] != OWN_TILES.get((gpu, part))])
            cells.append(
                (
                    f"{SAID[part][0]}, {columns} columns, {gpu}",
                    f"{own['us']:.0f}",
                    f"{100 * of_fastest(own, name):.1f} %",
                    f"{compiled['us'] / own['us']:.2f}",
                    best["by"].removeprefix(OTHER_TILE),
                    f"{best['us'] / own['us']:.2f}",
                )
            )
    head = ["what", "our tile, us", "share of the fastest copy", "PyTorch, compiled, over ours"]
    return markdown([*head, "fastest other tile", "over ours"], cells, left=head[:1])


def fastest(found: list[dict[str, Any]]) -> dict[str, Any]:
    return min(found, key=lambda one: float(one["us"]))


CAST_TILES = "NVFP4, both, "  # how rows with other tiles begin, in `operand`


def casts() -> str:
    """Return the table of casts beside a copy."""
    cells = [
        (
            one["tensor"],
            one["operand"],
            f"{one['us']:.0f}",
            "1" if one["operand"] == "copy" else f"{one['over_copy']:.2f}",
        )
        for one in rows(CASTS["H200"])
        if not one["operand"].startswith(CAST_TILES)
    ]
    columns = ["tensor", "operand", "us on an H200", "over the copy"]
    return markdown(columns, cells, left=columns[:2])


def share(part: str, name: str) -> str:
    """Return a part's rate, as we compute it now, over that of the fastest copy: '88.0 %'."""
    return f"{100 * of_fastest(newest(part, name), name):.1f} %"


def smaller_tile_over_ours(gpu: str) -> str:
    """Return the time of the tile 2048 x 2 over that of 4096 x 8, the kernel's default, for NVFP4's operands."""
    smaller, default = (row(CASTS[gpu], operand=f"{CAST_TILES}{tile}")["us"] for tile in ("2048 x 2", "4096 x 8"))
    return f"{smaller / default:.2f}"


def rotary() -> str:
    """Return the table of the rotary embedding of llama_125m: its kernels, and its bytes at the rate of a copy."""
    cells = []
    for gpu in CASTS:
        for operands, arm in enumerate((BF16, MXFP8), start=1):
            kernels, floor = rotary_ms(arm, gpu), rotary_least_ms(operands, gpu)
            met = "yes" if float(kernels) <= ROTARY_MS else "no"
            cells.append((f"{gpu}, {ARMS[arm]}", kernels, floor, f"at most {ROTARY_MS:g}", met))
    columns = ["ms of a step of llama_125m", "kernels", "bytes at the rate of a copy", "target", "met"]
    return markdown(columns, cells, left=columns[:1])


def rotary_ms(arm: str, gpu: str) -> str:
    return f"{ms_of('llama_125m', arm, gpu)['rotary embedding, with casts']:.2f}"


def rotary_least_ms(operands: int, gpu: str = GPU) -> str:
    """Return the ms of the bytes that the rotary embedding of llama_125m must move, at the rate of a copy.

    Forward and backward each read and write what they rotate; the backward also passes on the values' gradient, and
    writes `operands`.
    """
    settings = benchmark(name_of("llama_125m", gpu))["settings"]
    turned = HEAD_SIZE * (HEADS + KV_HEADS)
    stride = turned + HEAD_SIZE * KV_HEADS
    tokens = settings["batch"] * settings["sequence"] * MODELS["llama_125m"].layers
    moved = tokens * 2 * (2 * turned + (1 + operands) * stride)
    return f"{1e3 * moved / settings['copied_bytes_per_s']:.2f}"


def embedding_gb() -> str:
    """Return the gigabytes that the embedding's gradient moves as PyTorch computes it, without its sorting.

    A copy of dx in FP32: 2 bytes are read and 4 written. Zeros for the table. Then each row of that copy is read, and
    at most as many rows of the table are read and written.
    """
    hidden = MODELS["llama_1b"].hidden
    dx, table_of_fp32 = benchmark(H200)["settings"]["tokens"] * hidden, 4 * hidden * VOCABULARY
    return f"{(dx * (2 + 4 + 4 + 8) + table_of_fp32) / 1e9:.2f}"


def embedding_least_ms() -> str:
    return f"{float(embedding_gb()) / fastest_copy():.2f}"


def of_step(part: str) -> str:
    return f"{100 * ours(part)['ms_of_step'] / step_ms('llama_1b', 'bf16, fused'):.1f} %"


def left_over() -> str:
    """Return how many ms a bf16 step would save if every part here ran at the rate of the fastest copy."""
    parts = [one for one in rows(H200) if one["by"] in OURS and not one["part"].endswith("both casts")]
    return f"{sum(one['ms_of_step'] * max(0.0, 1 - of_fastest(one)) for one in parts):.1f}"


def copy_rate(part: str | None, name: str) -> str:
    """Return the TB/s of the copy beside a part of ours, or of the fastest one."""
    return f"{copied(ours(part, name)) if part else fastest_copy(name):.2f}"


TILED = {  # what a sentence calls it: the part, and the run
    "cross-entropy before": ("cross-entropy", BEFORE),
    "cross-entropy now": ("cross-entropy", NEWER),
    "norm backward then": ("norm backward", NEWER),
}
SHARES = ("swiglu backward, bf16", SWIGLU_CASTS, "adamw", "clip", "cross-entropy", "embedding gradient")
PARTS: Parts = {
    "parts": table,
    "saved": left_over,
    **{
        f"{said} copy, {gpu}": partial(copy_rate, part, name)
        for gpu, name in (("H200", H200), ("H100", H100))
        for said, part in (("fastest", None), ("SwiGLU's", SWIGLU_CASTS))
    },
    **{
        f"share of {part}, {gpu}": partial(share, part, name)
        for gpu, name in (("H200", H200), ("H100", H100))
        for part in SHARES
    },
    "rotary": rotary,
    "rotary at least, MXFP8, H200": partial(rotary_least_ms, 2),
    "rotary, MXFP8, H200": partial(rotary_ms, MXFP8, GPU),
    "embedding": lambda: f"{ours('embedding gradient')['ms_of_step']:.2f}",
    "embedding of the step": partial(of_step, "embedding gradient"),
    "embedding's GB": lambda: f"{ours('embedding gradient')['bytes'] / 1e9:.2f}",
    "embedding's GB in truth": embedding_gb,
    "embedding at least": embedding_least_ms,
    "tiles": other_tiles,
    "tiles, H100": partial(other_tiles, NEWER, "H100"),
    **{f"{said}, share": partial(share, part, name) for said, (part, name) in TILED.items()},
    "norms": norms,
    "casts": casts,
    "both": lambda: f"{row(CASTS['H200'], operand='NVFP4, both')['over_copy']:.2f}",
    **{f"2048 x 2 over ours, {gpu}": partial(smaller_tile_over_ours, gpu) for gpu in CASTS},
    **HEAD_LOSS,
}

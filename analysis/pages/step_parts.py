"""Make the parts of the page about what a training step does beside its GEMMs, from the JSON of benchmarks.parts.

The casts alone are from that of benchmarks.operands.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from analysis.pages.head_loss import HEAD_LOSS
from analysis.pages.marks import Parts, benchmark, row, rows
from analysis.pages.step_profile import AGAIN, ARMS, BF16, MODELS, MXFP8, groups_ms, ms_of, name_of, step_ms
from mxstudy.results import markdown

SAID = {  # {part of the benchmark: its name on the page, and the least share of a copy's rate that was wanted}
    "swiglu backward, bf16": ("SwiGLU, backward, bf16", 0.85),
    "swiglu backward, both casts": ("SwiGLU, backward, with both casts", 0.85),
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
NEWER_PARTS, NEWER_CASTS = "parts_h200", "operands_h200"  # of an H200, with the tiles of now
GPUS = ("H100", "H200")
HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 64  # of conf/model/llama_125m.yaml
ROTARY_MS = 2.0  # what the rotary embedding of a step of llama_125m was to take at most
VOCABULARY = 128256  # of conf/model/llama_1b.yaml
RATES = ("ms", "TB/s", "TB/s of a copy beside it", "share of the fastest copy")


def table() -> str:
    cells = []
    for one in rows("parts"):
        is_now = one["by"] == newest(one["part"])["by"]
        if is_now or one["by"] in BY:
            earlier = ", earlier tile" if one["by"] == "ours" and not is_now else ""
            by = BY.get(one["by"], BY["ours"]) + earlier
            cells.append((SAID[one["part"]][0], by, *rates(one, "parts"), target(one, "parts") if is_now else "-"))
    columns = ["part of a step of llama_1b, H100", "by", *RATES, "target"]
    return markdown(columns, cells, left=columns[:2])


def rates(one: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the cells of a row in the columns RATES."""
    return (
        f"{one['ms_of_step']:.2f}",
        f"{one['tb_per_s']:.2f}",
        f"{copied(one):.2f}",
        f"{100 * of_fastest(one, name):.0f} %",
    )


def target(one: dict[str, Any], name: str) -> str:
    """Return the least share that was wanted, and whether a row has it: '85 %, met'."""
    least = SAID[one["part"]][1]
    return f"{100 * least:.0f} %, {'met' if of_fastest(one, name) >= least else 'missed'}" if least else "-"


def copied(one: dict[str, Any]) -> float:
    """Return the TB/s of the copy beside a row."""
    return float(one["tb_per_s"] / one["of_copy"])


def fastest_copy(name: str = "parts") -> float:
    """Return the TB/s of the fastest of all copies of a run."""
    return max(copied(one) for one in rows(name))


def of_fastest(one: dict[str, Any], name: str) -> float:
    return float(one["tb_per_s"] / fastest_copy(name))


def ours(part: str, name: str = "parts") -> dict[str, Any]:
    (found,) = (one for one in rows(name) if one["part"] == part and one["by"] in OURS)
    return dict(found)


def newest(part: str, name: str = "parts") -> dict[str, Any]:
    """Return the row of a part as we compute it now."""
    return row(name, part=part, by=NEWER_TILES[part]) if name == "parts" and part in NEWER_TILES else ours(part, name)


OTHER_TILE = "ours, "  # how rows of our kernels with other tiles begin, in `by`


def other_tiles(name: str = "parts") -> str:
    """Return the table of our kernels with their tile and with the fastest other one that was tried."""
    cells = []
    for part, (said, _) in SAID.items():
        if others := tiles_of(part, name):
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
    columns = ["part of a step of llama_1b", "our tile, ms", "fastest other", "ms", "over ours", "others tried"]
    return markdown(columns, cells, left=columns[:1])


def tile_saves(part: str) -> str:
    """Return how many ms of a step the fastest other tile of a part saves."""
    return f"{ours(part)['ms_of_step'] - fastest(tiles_of(part))['ms_of_step']:.1f}"


def tiles_of(part: str, name: str = "parts") -> list[dict[str, Any]]:
    """Return the rows of a part by our kernel with other tiles."""
    return [one for one in rows(name) if one["part"] == part and one["by"].startswith(OTHER_TILE)]


def fastest(found: list[dict[str, Any]]) -> dict[str, Any]:
    return min(found, key=lambda one: float(one["us"]))


CAST_TILES = "NVFP4, both, "  # how rows with other tiles begin, in `operand`


def casts() -> str:
    """Return the table of casts beside a copy, with the fastest of the other tiles that make both of NVFP4's."""
    found = [one for one in rows("operands") if not one["operand"].startswith(CAST_TILES)]
    place = next(i for i, one in enumerate(found) if one["operand"] == "NVFP4, both")
    found.insert(place + 1, fastest(tiles_of_both()))
    cells = [
        (
            one["tensor"],
            one["operand"],
            f"{one['us']:.0f}",
            "1" if one["operand"] == "copy" else f"{one['over_copy']:.2f}",
        )
        for one in found
    ]
    columns = ["tensor", "operand", "us", "over the copy"]
    return markdown(columns, cells, left=columns[:2])


def tiles_of_both() -> list[dict[str, Any]]:
    """Return the rows of the other tiles of the kernel that makes both of NVFP4's operands."""
    return [one for one in rows("operands") if one["operand"].startswith(CAST_TILES)]


def tiles_on_both() -> str:
    """Return the table of the tiles of the kernel that makes both of NVFP4's operands, on an H100 and an H200."""
    older, newer = (
        {one["operand"]: one["us"] for one in rows(name) if one["operand"].startswith(CAST_TILES)}
        for name in ("operands", NEWER_CASTS)
    )
    cells = [(tile.removeprefix(CAST_TILES), f"{older[tile]:.0f}", f"{newer[tile]:.0f}") for tile in older]
    return markdown(["elements x warps", "us on an H100", "us on an H200"], cells, left=["elements x warps"])


def ours_on_the_h200() -> str:
    """Return the table of our kernels, with their shares of a copy, on an H200 and on an H100."""
    cells = []
    for part, (said, _) in SAID.items():
        own = newest(part, NEWER_PARTS)
        cells.append((said, *rates(own, NEWER_PARTS), share(part), target(own, NEWER_PARTS)))
    columns = ["our part of a step of llama_1b, H200", *RATES, "on the H100", "target"]
    return markdown(columns, cells, left=columns[:1])


def both_over_ours() -> str:
    return f"{fastest(tiles_of_both())['us'] / row('operands', operand='NVFP4, both')['us']:.2f}"


def share(part: str, name: str = "parts") -> str:
    """Return a part's rate, as we compute it now, over that of the fastest copy: '88 %'."""
    return f"{100 * of_fastest(newest(part, name), name):.0f} %"


def smaller_tile_over_ours(name: str) -> str:
    """Return the time of the tile 2048 x 2 over that of 4096 x 8, the kernel's default now, for NVFP4's operands."""
    smaller, default = (row(name, operand=f"{CAST_TILES}{tile}")["us"] for tile in ("2048 x 2", "4096 x 8"))
    return f"{smaller / default:.2f}"


def rotary() -> str:
    """Return the table of the rotary embedding of llama_125m: its kernels, and its bytes at the rate of a copy."""
    cells = []
    for gpu in GPUS:
        for operands, arm in enumerate((BF16, MXFP8), start=1):
            kernels, floor = rotary_ms(arm, gpu), rotary_least_ms(operands, gpu)
            met = "yes" if float(kernels) <= ROTARY_MS else "no"
            cells.append((f"{gpu}, {ARMS[arm]}", kernels, floor, f"at most {ROTARY_MS:g}", met))
    columns = ["ms of a step of llama_125m", "kernels", "bytes at the rate of a copy", "target", "met"]
    return markdown(columns, cells, left=columns[:1])


def rotary_ms(arm: str, gpu: str) -> str:
    return f"{ms_of('llama_125m', arm, gpu)['rotary embedding, with casts']:.2f}"


def rotary_least_ms(operands: int, gpu: str = "H100") -> str:
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
    dx, table_of_fp32 = benchmark("parts")["settings"]["tokens"] * hidden, 4 * hidden * VOCABULARY
    return f"{(dx * (2 + 4 + 4 + 8) + table_of_fp32) / 1e9:.2f}"


def embedding_least_ms() -> str:
    return f"{float(embedding_gb()) / fastest_copy():.2f}"


def of_step(part: str) -> str:
    return f"{100 * ours(part)['ms_of_step'] / step_ms('llama_1b', 'bf16, fused'):.1f} %"


def logits_rate(passes: int) -> float:
    """Return the TB/s of the cross-entropies of llama_1b, if each goes over the logits `passes` times."""
    settings = benchmark(name_of("llama_1b", "H100"))["settings"]
    whole = settings["batch"] * settings["sequence"] * settings["vocabulary"] * 2
    return float(passes * whole / ms_of("llama_1b", "bf16, fused")["cross-entropy"] / 1e9)


def left_over(name: str = "parts") -> str:
    """Return how many ms a bf16 step would save if every part here ran at the rate of a copy."""
    parts = [one for one in rows(name) if one["by"] in OURS and not one["part"].endswith("both casts")]
    return f"{sum(one['ms_of_step'] * max(0.0, 1 - one['of_copy']) for one in parts):.1f}"


def copy_rate(part: str | None, name: str) -> str:
    """Return the TB/s of the copy beside a part of ours, or of the fastest one."""
    return f"{copied(ours(part, name)) if part else fastest_copy(name):.2f}"


WHERE = {"": "parts", ", H200": NEWER_PARTS}
SHARES = ("swiglu backward, bf16", SWIGLU_CASTS, "adamw", "clip", "cross-entropy", "embedding gradient")
PARTS: Parts = {
    "parts": table,
    "saved": left_over,
    **{
        f"{said} copy{where}": partial(copy_rate, part, name)
        for where, name in WHERE.items()
        for said, part in (("fastest", None), ("SwiGLU's", SWIGLU_CASTS))
    },
    **{f"share of {part}{where}": partial(share, part, name) for where, name in WHERE.items() for part in SHARES},
    "earlier tile": lambda: f"{100 * of_fastest(ours(SWIGLU_CASTS), 'parts'):.0f} %",
    "rotary": rotary,
    **{f"rotary at least, MXFP8, {gpu}": partial(rotary_least_ms, 2, gpu) for gpu in GPUS},
    **{f"rotary, MXFP8, {gpu}": partial(rotary_ms, MXFP8, gpu) for gpu in GPUS},
    "embedding": lambda: f"{ours('embedding gradient')['ms_of_step']:.2f}",
    "embedding of the step": partial(of_step, "embedding gradient"),
    "embedding's GB": lambda: f"{ours('embedding gradient')['bytes'] / 1e9:.2f}",
    "embedding's GB in truth": embedding_gb,
    "embedding at least": embedding_least_ms,
    "cross-entropy": lambda: f"{ms_of('llama_1b', 'bf16, fused')['cross-entropy']:.2f}",
    "cross-entropy alone": lambda: f"{ours('cross-entropy')['ms_of_step']:.2f}",
    "cross-entropy, compiled": lambda: f"{row('parts', part='cross-entropy', by='inductor')['ms_of_step']:.2f}",
    "tiles": other_tiles,
    "tiles, H200": partial(other_tiles, NEWER_PARTS),
    "tiles of both, by GPU": tiles_on_both,
    "2048 x 2 over ours, H100": partial(smaller_tile_over_ours, "operands"),
    "2048 x 2 over ours, H200": partial(smaller_tile_over_ours, NEWER_CASTS),
    "parts, H200": ours_on_the_h200,
    "tile of SwiGLU saves": partial(tile_saves, SWIGLU_CASTS),
    "casts": casts,
    "both over ours": both_over_ours,
    "tiles of both": lambda: f"{len(tiles_of_both())}",
    "cross-entropy, newer": lambda: f"{groups_ms(AGAIN, BF16)['cross-entropy']:.2f}",
    "both": lambda: f"{row('operands', operand='NVFP4, both')['over_copy']:.2f}",
    **HEAD_LOSS,
    "cross-entropy in two passes": lambda: f"{logits_rate(2):.2f}",
    "cross-entropy in three passes": lambda: f"{logits_rate(3):.2f}",
}

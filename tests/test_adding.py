"""The tutorial's end and the guides work to the letter: every block goes where its first line says, and is run.

After them come three ideas that a new user had before there were recipes: each trains as itself or is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import run_here
from edited import ROOT, SAME, Block, Copy, journal_in, losses_in

from mxstudy.config.casts import BlockCast
from mxstudy.config.model import AnyNorm
from mxstudy.config.observation import Probes, Scheduled
from mxstudy.model.norm import build_norm
from mxstudy.probes.build import build_probes
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.slow

PAGES = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("own_*.md"))]
FENCED = re.compile(r"^```(?:python|yaml)\n# (\S+?)(?:, (in|above) (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BEGINS = re.compile(r"An? ")
COMMAND = re.compile(r"^    (python -m mxstudy .*)$", re.MULTILINE)

RUN = "python -m mxstudy +experiment=quickstart +debug=tiny tracking=none"
REFERENCE = "precision.backend=reference"
LACK = "fused kernels do not support"

# {recipe: the choices of a run that differs from it in the idea alone, and what the plan says about its blocks}
RECIPES = {
    "An experiment": (("precision=mxfp8",), "3 blocks: fused\n"),
    "A change of your own": (("model.num_layers=1",), "layers.0: fused\n"),
    "A precision recipe": (("precision=mxfp4", REFERENCE), "3 blocks: fused\n"),
    "A format": (("precision=mxfp4", REFERENCE), f"3 blocks: reference ({LACK} forward_x.format=E2M2, only E4M3 or"),
    "A rounding": (
        ("precision=mxfp4", REFERENCE),
        f"3 blocks: reference ({LACK} dgrad_dh.rounding=dithered, only even or away or stochastic)\n",
    ),
    "A norm": (("precision=mxfp4", REFERENCE), "3 blocks: reference (L1Norm has no kernel)\n"),
    "A probe": ((), "3 blocks: fused\n"),
}


class Recipe(NamedTuple):
    blocks: list[Block]
    command: str


def recipes() -> dict[str, Recipe]:
    """Return the recipes by heading. A block without a place, or a recipe without exactly one command, is an error."""
    found = {}
    sections = [part for page in PAGES for part in page.read_text().split("\n## ")[1:] if BEGINS.match(part)]
    for name, text in (section.split("\n", 1) for section in sections):
        blocks = [Block(*groups) for groups in FENCED.findall(text)]
        assert len(blocks) == text.count("```") / 2 > 0, f"{name}: a block does not say where it goes"
        (command,) = COMMAND.findall(text)
        found[name] = Recipe(blocks, command)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[..., list[float]]:
    """Return the losses of the quickstart's rehearsal by the package as it is, with these choices."""
    known: dict[tuple[str, ...], list[float]] = {}

    def losses_of(*choices: str) -> list[float]:
        if choices not in known:
            folder = tmp_path_factory.mktemp("baseline")
            run_here(folder, *shlex.split(RUN)[3:], *SAME, *choices, f"cache_dir={cache}")
            known[choices] = losses_in(folder)
        return known[choices]

    return losses_of


@pytest.fixture
def copy(tmp_path: Path, cache: Path) -> Copy:
    return Copy(tmp_path / "copy", cache)


def follow(name: str, copy: Copy, *words: str) -> str:
    """Follow that recipe in the copy, and return what its command printed, with further words at its end."""
    recipe = recipes()[name]
    for block in recipe.blocks:
        copy.add(block)
    return copy.trained(recipe.command, *words)


def test_every_recipe_is_followed() -> None:
    assert recipes().keys() == RECIPES.keys()


@pytest.mark.parametrize("name", ["A precision recipe", "A format", "A norm"])
def test_what_is_added_changes_the_numbers_and_the_plan_names_its_backend(
    name: str, copy: Copy, losses_of: Callable[..., list[float]]
) -> None:
    choices, plan = RECIPES[name]
    said = follow(name, copy)
    assert plan in said
    losses, without = copy.losses(), losses_of(*choices)
    assert len(losses) == len(without)
    assert losses != without
    assert losses == pytest.approx(without, abs=0.5)  # the losses are 4 to 6 nats


def test_an_experiment_is_the_choices_that_it_makes(copy: Copy, losses_of: Callable[..., list[float]]) -> None:
    choices, plan = RECIPES["An experiment"]
    said = follow("An experiment", copy)
    assert plan in said
    assert losses_of(*choices) != copy.losses() == losses_of("norm=mxnorm_p2", *choices)


def test_a_change_of_your_own_is_compared_over_seeds(copy: Copy) -> None:
    said = follow("A change of your own", copy, "model.num_layers=1", "train.steps=4", "validation.sequences=2")
    assert said.count(RECIPES["A change of your own"][1]) == 12
    rows = re.findall(r"^ *(rmsnorm|mxnorm_p[24]) +4 +0 +\S+ ± \S+ +(.*?) +[\d,]+ *$", said, re.MULTILINE)
    assert [name for name, _ in rows] == ["rmsnorm", "mxnorm_p2", "mxnorm_p4"]
    assert dict(rows)["rmsnorm"] == "baseline"
    assert " ± " in dict(rows)["mxnorm_p4"] != dict(rows)["mxnorm_p2"]


def test_a_rounding_changes_the_numbers_and_another_under_its_name_is_not_skipped_in_silence(
    copy: Copy, losses_of: Callable[..., list[float]]
) -> None:
    choices, plan = RECIPES["A rounding"]
    said = follow("A rounding", copy)
    losses = copy.losses()
    assert plan in said
    assert losses != losses_of(*choices)
    copy.replace("mxstudy/numerics/formats.py", "(u - 0.5) / 2)", "(u - 0.5) / 4)")
    command = recipes()["A rounding"].command
    code, said = copy.run(command)
    assert code != 0
    assert "stale: other code made this run (mxstudy/numerics/formats.py); stale=rerun trains it again" in said
    assert "skipped: finished" in copy.trained(command, "stale=ok")
    assert copy.losses() == losses
    assert "skipped" not in copy.trained(command, "stale=rerun")
    assert copy.losses() != losses


def test_a_probe_is_in_the_journal_and_changes_no_bit(copy: Copy, losses_of: Callable[..., list[float]]) -> None:
    choices, plan = RECIPES["A probe"]
    said = follow("A probe", copy)
    assert plan in said
    assert copy.losses() == losses_of(*choices)
    rows = journal_in(copy.folder)
    measured = {row["step"]: row["values"] for row in rows if row.get("probe") == "gradient_rms"}
    assert list(measured) == [0, 5]
    assert all(values["layers.0.attention.wo.weight/rms"] > 0 for values in measured.values())


def test_a_norm_without_its_row_is_refused() -> None:
    class L1Norm(AnyNorm):
        kind = "l1norm"

    with pytest.raises(ConfigError, match=r"norm\.kind: L1Norm has no row in NORMS"):
        build_norm(L1Norm(), 64, BlockCast())  # type: ignore[arg-type]


def test_a_probe_without_its_row_is_refused() -> None:
    Own = make_dataclass("Own", [("gradient_rms", Scheduled, Scheduled())], bases=(Probes,), frozen=True, kw_only=True)
    with pytest.raises(ConfigError, match=r"probe\.gradient_rms: has no row in PROBES"):
        build_probes(Own(gradient_rms=Scheduled(every_steps=5)))


# ----------------------------------------------------------------------------------------------- ideas without a recipe

CASTS, MATMUL = "mxstudy/config/casts.py", "mxstudy/numerics/gemms.py"


def recipe(name: str, operand: str, **of_one: str) -> Block:
    """Return a file of conf/precision: MXFP4, except for what one operand's cast says."""
    settings = "".join(f", {key}: {value}" for key, value in of_one.items())
    operands = ("forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x")
    casts = "".join(f"    {each}: {{format: E2M1{settings if each == operand else ''}}}\n" for each in operands)
    plan = f'schedule:\n  - {{from_step: 0, plan: {{"layers.*": {name}}}}}\n'
    return Block(
        f"conf/precision/{name}.yaml", "", "", f"defaults:\n  - base_precision\n{plan}recipes:\n  {name}:\n{casts}"
    )


def test_a_hadamard_field_of_the_gemms_that_an_operand_reads(copy: Copy, losses_of: Callable[..., list[float]]) -> None:
    copy.replace(CASTS, "    wgrad_x: Cast | None = None\n", "    wgrad_x: Cast | None = None\n    hadamard: int = 0\n")
    copy.replace(
        MATMUL,
        "        x, cast = self.rotated(x, gemm_of(name), axis), self.gemms.cast_of(name)\n",
        "        x, cast = self.rotated(x, gemm_of(name), axis), self.gemms.cast_of(name)\n"
        "        if self.gemms.hadamard:\n"
        "            x = hadamard(to_dtype(x, torch.float32), self.gemms.hadamard, None, axis=axis)\n",
    )
    row = '"mxfp4_rht": Gemms(**dict.fromkeys(OPERANDS, Cast(format=E2M1)), hadamard=32),\n'
    copy.add(Block("mxstudy/config/recipes.py", "in", "PRECISIONS", row))
    plan = 'schedule:\n  - {from_step: 0, plan: {"layers.*": mxfp4_rht}}\n'
    copy.add(Block("conf/precision/mxfp4_rht.yaml", "", "", f"defaults:\n  - base_precision\n{plan}"))
    said = copy.trained(RUN, "precision=mxfp4_rht")
    assert f"3 blocks: reference ({LACK} hadamard=32, only 0)\n" in said
    assert copy.losses() != losses_of("precision=mxfp4", "precision.backend=reference")


def test_a_field_of_the_cast_that_the_cast_reads(copy: Copy, losses_of: Callable[..., list[float]]) -> None:
    copy.replace(CASTS, "    headroom: float = 1.0\n", "    headroom: float = 1.0\n    clip: float = 1.0\n")
    copy.replace(
        "mxstudy/numerics/cast.py",
        "    a = STATISTICS[cast.statistic](blocks, tiles, element, cast)\n",
        "    a = STATISTICS[cast.statistic](blocks, tiles, element, cast) * cast.clip\n",
    )
    copy.add(recipe("clipped", "wgrad_dh", clip="0.5"))
    said = copy.trained(RUN, "precision=clipped")
    assert f"3 blocks: reference ({LACK} wgrad_dh.clip=0.5, only 1.0)\n" in said
    assert copy.losses() != losses_of("precision=mxfp4", "precision.backend=reference")


MEDIAN = """class MedianNorm(MXNorm):
    def rms(self, x: Tensor) -> Tensor:
        return x.float().abs().median(-1, keepdim=True).values * 1.4826 + self.eps
"""


def test_a_norm_that_inherits_trains_as_itself(copy: Copy, losses_of: Callable[..., list[float]]) -> None:
    """A norm that inherits from MXNorm, and takes its row in NORMS."""
    copy.add(Block("mxstudy/model/norm.py", "above", "NORMS", MEDIAN))
    row = "    config.MXNorm: lambda norm, size, cast: "
    copy.replace("mxstudy/model/norm.py", f"{row}MXNorm(", f"{row}MedianNorm(")
    words = ("norm=mxnorm_p2", "precision=mxfp8", "model.num_layers=1")
    said = copy.trained(RUN, *words)
    assert "layers.0: reference (MedianNorm has no kernel)\n" in said
    eager, plain = copy.losses(), losses_of(*words)
    assert max(abs(a - b) for a, b in zip(eager, plain, strict=True)) > 1e-2


def test_a_rounding_that_fused_kernels_are_asked_for_is_refused(copy: Copy) -> None:
    copy.add(Block("mxstudy/numerics/formats.py", "in", "ROUNDINGS", '"toward_zero": Rounding(torch.trunc),\n'))
    copy.add(recipe("truncated", "dgrad_dh", rounding="toward_zero"))
    code, said = copy.run(RUN, "precision=truncated", "precision.backend=fused")
    assert code == 1
    assert f"precision.backend: fused cannot run layers.0: {LACK} dgrad_dh.rounding=toward_zero, only even or" in said
    assert not list(copy.folder.glob("runs/*/*"))

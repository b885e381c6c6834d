"""Pre-training as a kind of run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

from mxstudy.config import OutlierFeatures, Pretrain, Texts
from mxstudy.config.settings import casts_of
from mxstudy.data import blends
from mxstudy.reader import changed, require
from mxstudy.studies.pretrain.check import (
    backend_notes,
    backends_over,
    check,
    flops_per_token,
    plan,
    recomputation,
    size,
)
from mxstudy.studies.protocol import (
    Cost,
    Identity,
    Study,
    Uses,
    Watched,
    on_planned_device,
    probes_of,
    unused_messages,
)
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.runtime import PEAK_FLOPS, resolve_device

# The share of its bf16 peak rate that a GPU reached in pre-training: medians of results/mxnorm_pretrain.md.
GPU, MFU_BF16, MFU_MX = "NVIDIA H200", 0.43, 0.44
# The same of recipes of conf/precision, from MFU_MX and the steps of mxfp8 and of the recipe, with all its parts, in
# results/train_step_h200_llama_125m.json.
MFU_OF = {"nvfp4": 0.37}
# The same of a mixture of experts in bf16, and by recipe: results/experts.json. No other recipe was measured in one.
MIXTURE_BF16, MIXTURE_OF = 0.29, {"mxfp8": 0.21}
# The keys that decide the questions. Not data_dir, because a folder may move.
QUESTIONS = ("tasks", "form", "task_forms", "shots", "task_shots", "shots_seed", "curated_shots", "shots_dir", "limit")
WRITTEN = ("prompts", *vars(Texts()))  # the keys that decide the texts
AT_RATE = f"""\
GPU hours: at the MFU of a 125M Llama on one {GPU}, {MFU_BF16:.0%} in bf16, {MFU_MX:.0%} with emulated MX
arithmetic and {", ".join(f"{mfu:.0%} in {name}" for name, mfu in MFU_OF.items())} with all its parts."""
MIXTURE_AT_RATE = f"""\
GPU hours: at the MFU of a 203M mixture of experts on one {GPU}, in grouped GEMMs, {MIXTURE_BF16:.0%} in bf16 and
{", ".join(f"{mfu:.0%} in {name}" for name, mfu in MIXTURE_OF.items())}."""
UNQUANTISED = {"bf16", "fp32"}  # rows of PRECISIONS
NO_OPERAND = {
    "probe.gradient_bias.by_operand": "probe.gradient_bias.by_operand: true is set, and no linear is quantised; write "
    "probe.gradient_bias.by_operand=false, or quantise some, as precision=mxfp8 does"
}


class PretrainStudy(Study[Pretrain]):
    uses: ClassVar[Uses] = Uses.TASK_EACH

    def check(self, config: Pretrain, ranks: int = 1) -> None:
        check(config, ranks)

    def pinned(self, config: Pretrain) -> Pretrain:
        return changed(config, train=on_planned_device(config.train))

    def identity_key(self, config: Pretrain) -> Hashable:
        return repr(config.data), config.tokenizer, config.train.device

    def identity(self, config: Pretrain) -> Identity:
        """Return the device's type, and the identities of corpora and tokenizer; may hash every file of them."""
        return resolve_device(config.train.device).type, blends.identity(config.data, config.tokenizer)

    def backends(self, config: Pretrain) -> str | None:
        return backends_over(config, 1)

    def unused_settings(self, config: Pretrain) -> dict[str, str]:
        is_unused = config.probe.gradient_bias.by_operand and not casts_of(config.precision)
        unused = unused_messages(config.precision, config.norm, config.precision.gain)
        return unused | (NO_OPERAND if is_unused else {})

    def watched(self, config: Pretrain) -> dict[str, Watched]:
        return probes_of(config.probe) | {"evaluation": config.evaluation, "sample": config.sample}

    def check_watched(self, config: Pretrain) -> None:
        super().check_watched(config)
        ring_steps = config.probe.outlier_features.ring_steps
        require(
            config.probe.spikes.every_steps > 0 or ring_steps in (0, OutlierFeatures.ring_steps),
            "probe.outlier_features.ring_steps: has no effect without spikes; set probe.spikes.every_steps=1",
        )

    def changed_questions(self, then: Pretrain, now: Pretrain) -> list[str]:
        return [
            f"{part}.{name}"
            for part, names in (("evaluation", QUESTIONS), ("sample", WRITTEN))
            for before, after in [(getattr(then, part), getattr(now, part))]
            if before.every_steps and after.every_steps
            for name in names
            if getattr(before, name) != getattr(after, name)
        ]

    def cost(self, config: Pretrain, done: int) -> Cost:
        """Return the cost of the remaining steps, without validation, probes and recomputation."""
        tokens = config.train.batch_size * config.train.sequence_length
        flops = float(tokens * flops_per_token(config))
        bf16, of = (MIXTURE_BF16, MIXTURE_OF) if is_mixture(config) else (MFU_BF16, MFU_OF)
        rates = [of.get(name, MFU_MX) for name in recipes_in(config) - UNQUANTISED]
        rate = PEAK_FLOPS[GPU] * min(rates, default=bf16)
        hours = None if unmeasured(config) else flops / rate / 3600
        return Cost(tokens, flops, hours) * (config.train.steps - done)

    def gpu_hours_note(self, config: Pretrain) -> str:
        what = unmeasured(config)
        at_rate = MIXTURE_AT_RATE if is_mixture(config) else AT_RATE
        return f"GPU hours: no rate was measured for {what}." if what else at_rate

    def model_notes(self, config: Pretrain) -> list[str]:
        return [size(config), *backend_notes(config)]

    def precision_plan(self, config: Pretrain) -> list[str]:
        return plan(config)

    def recomputation(self, config: Pretrain) -> str:
        return recomputation(config)

    def run(self, config: Pretrain, folder: RunFolder, label: str) -> str:
        from mxstudy.studies.pretrain.run import run

        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        from mxstudy.studies.pretrain.tables import summarise

        return summarise(runs, baseline)


def recipes_in(config: Pretrain) -> set[str]:
    """Return the names of the recipes in any of the run's plans."""
    return {name for row in config.precision.schedule for name in row.plan.values()}


def is_mixture(config: Pretrain) -> bool:
    return config.model.mlp == "moe"


def unmeasured(config: Pretrain) -> str | None:
    """Return the name of the run's kind if its rate was not measured on a GPU, else None."""
    others = sorted(recipes_in(config) - UNQUANTISED - MIXTURE_OF.keys())
    if is_mixture(config) and others:
        return f"a mixture of experts in {', '.join(others)}"
    if own := sorted((recipes_in(config) & config.precision.recipes.keys()) - MFU_OF.keys()):
        return f"the recipe {', '.join(own)}"
    return None if config.train.compute == "bf16" else f"train.compute={config.train.compute}"


STUDY = PretrainStudy()

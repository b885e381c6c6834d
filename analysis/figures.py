"""Draw every figure and table whose data is in results/, and print the commands that make the runs of the others.

The figures go to figures/published. With --pages, they replace the images on the pages of results/.

python -m analysis.figures [NAME ...] [--pages]
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from functools import partial

from analysis.command import Parser, command
from analysis.figure import BENCHMARK, Figure, benchmark, sweep
from analysis.fp4.questions import QUESTIONS
from analysis.ledger.tables import RESULTS
from analysis.style import FOLDER, with_palette

PUBLISHED = "published"


def students(number: int, name: str, arguments: str, results: str | None = None) -> Figure:
    """Return a figure of the losses of the instability paper's students, from the sweep of that name."""
    about, name_of_files = f"instability paper, figure {number}", f"instability_fig{number:02}_{name}"
    return Figure(name_of_files, about, TRAINED, *sweep(name), results, "students.losses", arguments)


APPROXIMATION = ("python -m mxstudy +experiment=approximation", "runs/approximation")
PROBED = ("python -m mxstudy +sweep=mxnorm_pretrain probe=activations", "runs/mxnorm_pretrain", "mxnorm_pretrain")
PROXY = (*sweep("spike_proxy"), "spike_proxy")
GRID = (*sweep("learning_rate_grid"), "learning_rate_grid")
WINDOW = (
    "python -m mxstudy -m +experiment=learning_rate_grid model.num_layers=4 model.hidden_size=512,768 "
    "precision=fp32,mx_mix lrs=[2e-4,4e-4,6e-4] seeds=[0,1] data_seed=23,24,25,26",
    "runs/learning_rate_grid",
    "learning_rate_window",
)
OVERFLOW = (*sweep("overflow"), "overflow")
GRADIENT_BIAS = (*sweep("gradient_bias"), "gradient_bias")
CONVERGENCE, ELEMENTS, MITIGATIONS = sweep("convergence"), sweep("element_formats"), sweep("mitigations")
DECISIVE = "decisive decisive_2 decisive_3"
TRAIN_STEPS = "train_step_h200_llama_125m_more_arms train_step_h200_llama_1b"
ZERO_SHOT = (
    ("scores", "samples"),
    "python -m mxstudy +sweep=mxnorm_pretrain && "
    "python -m mxstudy +experiment=olmes checkpoint=FINGERPRINT,FINGERPRINT,FINGERPRINT",
    "runs/olmes",
)
RUNS, TRAINED, VALIDATED = ("runs",), ("runs", "metrics"), ("runs", "validation")

comparison = partial(Figure, script="loss_comparison")
curves = partial(Figure, script="instability.loss_and_gradient_norm")
fits = partial(Figure, script="instability.table02_scaling_fits")
models = partial(Figure, script="models_table")
FIGURES = (
    Figure("loss_curves", "training losses", (*RUNS, "metrics"), *PROBED, script="loss_curves"),
    Figure("norm_rms", "norms' outputs", (*RUNS, "norm_output_rms"), *PROBED, script="mxnorm.fig06_norm_rms"),
    Figure(
        "histograms", "norms' inputs, outputs", ("activation_histograms",), *PROBED, script="mxnorm.fig07_histograms"
    ),
    comparison("spike_proxy_losses", "their losses", TRAINED, *PROXY, arguments="--baseline norm=rmsnorm"),
    Figure("mxnorm_fig02_approximation", "MXNorm paper, figure 2", ("distributions", "fidelity"), *APPROXIMATION),
    Figure("mxnorm_theorem1_bounds", "MXNorm paper, Theorem 1, lemmas", ("convergence", "bounds"), *APPROXIMATION),
    Figure("mxnorm_fig03_lr_sensitivity", "MXNorm paper, figure 3", RUNS, *sweep("lr_sensitivity"), "lr_sensitivity"),
    Figure(
        "lr_sensitivity_paired",
        "the same, of four paired seeds at 23M",
        RUNS,
        *sweep("lr_sensitivity_paired"),
        "lr_sensitivity_paired",
        script="mxnorm.fig03_lr_sensitivity",
    ),
    comparison(
        "mxnorm_fig04_convergence",
        "MXNorm paper, figure 4",
        TRAINED,
        *CONVERGENCE,
        arguments="--only model=llama_8b --baseline norm=rmsnorm",
    ),
    comparison(
        "mxnorm_equivalence",
        "the norms' losses at the best rate",
        TRAINED,
        *sweep("mxnorm_equivalence"),
        "mxnorm_equivalence",
        arguments="--baseline norm=rmsnorm",
    ),
    Figure("mxnorm_fig05_outlier_feature", "MXNorm paper, figure 5", ("metrics", "outlier_features"), *PROXY),
    Figure("mxnorm_fig06_norm_rms", "MXNorm paper, figure 6", ("norm_output_rms",), *PROXY),
    Figure("mxnorm_fig07_histograms", "MXNorm paper, figure 7", ("activation_histograms",), *PROXY),
    Figure("mxnorm_fig08_kernels", "MXNorm paper, figure 8", BENCHMARK, *benchmark("kernels"), "kernels"),
    comparison(
        "mxnorm_figa2_convergence",
        "MXNorm paper, figure A.2",
        TRAINED,
        *CONVERGENCE,
        arguments="--only model=llama_1b --baseline norm=rmsnorm",
    ),
    Figure("mxnorm_figa3_spike_scores", "MXNorm paper, figure A.3", RUNS, *PROXY),
    comparison(
        "mxnorm_figa4_post_round",
        "MXNorm paper, figure A.4",
        TRAINED,
        *sweep("post_round"),
        arguments="--only model=llama_8b --baseline norm=rmsnorm",
    ),
    Figure("mxnorm_table02_zero_shot", "MXNorm paper, table 2", *ZERO_SHOT, "olmes_seed0"),
    Figure("zero_shot_seed1", "the same, seed 1", *ZERO_SHOT, "olmes_seed1", script="mxnorm.table02_zero_shot"),
    models(
        "mxnorm_table03_models",
        "MXNorm paper, table 3",
        RUNS,
        *sweep("lr_sensitivity", "convergence"),
        arguments="--paper mxnorm",
    ),
    Figure(
        "cast_quality",
        "every format, scale rule and rounding",
        ("quality",),
        *APPROXIMATION,
        script="recipe.cast_quality",
    ),
    curves("instability_fig01_losses", "instability paper, figure 1", TRAINED, *sweep("olmo_precision_grid")),
    students(
        2, "activations_and_norm", "--columns model.activation --rows norm model.num_layers", "activations_and_norm"
    ),
    Figure("instability_fig03_overflow", "instability paper, figure 3", (*TRAINED, "last_bin"), *OVERFLOW),
    Figure("instability_fig03_language", "the same of language models' gains", ("last_bin",), *sweep("olmo_gains")),
    Figure(
        "instability_fig04_interventions",
        "instability paper, figure 4",
        ("runs", "forks", "fork_metrics"),
        "python -m mxstudy +sweep=overflow && python -m mxstudy +sweep=interventions parent=FINGERPRINT,FINGERPRINT",
        "runs/interventions",
        "interventions_2",
    ),
    Figure(
        "instability_fig05_gradient_bias",
        "instability paper, figure 5",
        (*TRAINED, "gradient_bias", "coupled_gradient_bias"),
        *GRADIENT_BIAS,
    ),
    Figure(
        "gradient_bias_at_divergence",
        "the same around each replica's divergence",
        (*TRAINED, "gradient_bias", "coupled_gradient_bias"),
        *GRADIENT_BIAS,
        script="instability.fig05_gradient_bias",
        arguments="--around-divergence 2000",
    ),
    Figure(
        "student_sharpness",
        "instability paper, Eq. 10",
        (*TRAINED, "sharpness"),
        *GRADIENT_BIAS,
        script="students.sharpness",
    ),
    Figure(
        "student_sharpness_at_divergence",
        "the same around each replica's divergence",
        (*TRAINED, "sharpness"),
        *GRADIENT_BIAS,
        script="students.sharpness",
        arguments="--around-divergence 2000",
    ),
    Figure("instability_fig06_learning_rate_grid", "instability paper, figure 6", TRAINED, *GRID),
    Figure("learning_rate_window", "appendix C.1", TRAINED, *WINDOW, script="instability.fig06_learning_rate_grid"),
    students(7, "attention", "--columns model", "attention"),
    students(8, "loss", "--columns loss", "loss"),
    Figure("instability_fig09_depth_width", "instability paper, figure 9", RUNS, *sweep("depth_width")),
    students(10, "optimizers", "--columns optimizer", "optimizers"),
    students(11, "initialisation", "--columns model.init", "initialisation"),
    Figure(
        "student_decisive",
        "why students diverge, arm by arm",
        RUNS,
        *sweep("decisive"),
        DECISIVE,
        script="students.decisive",
    ),
    Figure(
        "train_step_cost",
        "the price of a step",
        BENCHMARK,
        *benchmark("train_step"),
        TRAIN_STEPS,
        script="recipe.train_step_cost",
    ),
    curves("instability_fig12_layernorm_affine", "instability paper, figure 12", TRAINED, *sweep("layernorm_affine")),
    *(
        fits(
            f"instability_fig{number}_{name}",
            f"instability paper, figure {number}",
            RUNS,
            *MITIGATIONS,
            arguments=f"--arms {arms}",
        )
        for number, name, arms in (
            (13, "bf16_activations", "e4m3_bfloat16 e5m2_bfloat16"),
            (14, "forward_only", "e4m3_e4m3_forward_only e5m2_e5m2_forward_only"),
            (15, "baseline", "bfloat16_bfloat16 e2m3_bfloat16"),
        )
    ),
    *(
        curves(
            f"instability_fig{number}_{name}",
            f"instability paper, figure {number}",
            TRAINED,
            *runs,
            arguments=f"--only {' '.join(f'precision={precision}' for precision in precisions)}",
        )
        for number, name, runs, *precisions in (
            (16, "forward_only", MITIGATIONS, "mxfp8_forward_only", "mxfp8_e5m2_forward_only"),
            (17, "bf16_activations", MITIGATIONS, "mxfp8_bf16_act", "mxfp8_e5m2_bf16_act"),
            (18, "code", sweep("unstable_pairs", "olmo_precision_grid"), "mxfp8", "mxfp8_e5m2"),
            (19, "mxfp8_pairs", sweep("unstable_pairs"), "mxfp8_e5m2_weight", "mxfp8_e5m2_act_grad"),
            (20, "mxfp6", sweep("unstable_pairs"), "mxfp6_e2m3", "mxfp6_e3m2"),
        )
    ),
    Figure("instability_table02_scaling_fits", "instability paper, table 2", RUNS, *MITIGATIONS),
    models(
        "instability_table03_models",
        "instability paper, table 3",
        RUNS,
        *sweep("olmo_precision_grid"),
        arguments="--paper instability",
    ),
    Figure("instability_table04_mitigations", "instability paper, tables 1, 4 and 5", RUNS, *MITIGATIONS),
    Figure("formats_table", "MXFP8 recipe, table 1", ("formats",), *APPROXIMATION, script="recipe.formats_table"),
    *(
        comparison(
            f"mxfp8_fig02{part}_scale_rounding",
            f"MXFP8 recipe, figure 2 ({part})",
            VALIDATED,
            *sweep("scale_rounding"),
            arguments=f"--of validation_perplexity --only train.steps={steps} --baseline precision=bf16",
        )
        for part, steps in (("a", 286_102), ("b", 953_674))  # 300 billion tokens, 1 trillion
    ),
    *(
        comparison(
            f"mxfp8_fig03{part}_element_formats",
            f"MXFP8 recipe, figure 3 ({part})",
            VALIDATED,
            *ELEMENTS,
            arguments=f"--of validation_perplexity --only model={model} --baseline precision={baseline}",
        )
        for part, model, baseline in (("a", "nemotron_843m", "bf16"), ("b", "nemotron_8b", "mxfp8"))
    ),
    comparison(
        "mxfp8_fig05_mxfp8_vs_bf16",
        "MXFP8 recipe, figure 5, top",
        VALIDATED,
        *sweep("mxfp8_vs_bf16"),
        arguments="--of validation_perplexity --baseline precision=bf16",
    ),
    Figure(
        "mxfp8_fig05_reasoning",
        "MXFP8 recipe, figure 5, bottom",
        (*RUNS, "evaluation"),
        "python -m mxstudy +sweep=mxfp8_vs_bf16 checkpoint.every_steps=200000 checkpoint.keep_last=12 && "
        "python -m mxstudy +experiment=nvidia_reasoning "
        "checkpoint=$(ls -d runs/mxfp8_vs_bf16/*/checkpoints/step_* | paste -sd,)",
        "runs/mxfp8_vs_bf16 runs/nvidia_reasoning",
        script="recipe.fig05_reasoning",
    ),
    comparison(
        "mxfp8_fig06_mixture_of_experts",
        "MXFP8 recipe, figure 6",
        TRAINED,
        *sweep("moe"),
        "moe",
        arguments="--baseline precision=bf16",
    ),
    Figure(
        "recipe_23m",
        "the recipe's arms at 23M",
        RUNS,
        *sweep("recipe_23m"),
        "recipe_23m",
        script="arm_losses",
        arguments="--of recipe_23m",
    ),
    comparison(
        "shakespeare",
        "a 10M model on one text, in bf16 and MXFP8",
        TRAINED,
        *sweep("shakespeare"),
        "shakespeare",
        arguments="--baseline precision=bf16",
    ),
    models("mxfp8_table02_models", "MXFP8 recipe, table 2", RUNS, *ELEMENTS, arguments="--paper mxfp8"),
    *(
        Figure(
            name,
            shows,
            kinds,
            *sweep(of.sweep),
            of.sweep,
            script,
            f"--of {of.sweep}",
        )
        for of in QUESTIONS
        for name, shows, kinds, script in (
            (of.sweep, of.asks, (*RUNS, "gradient_bias"), "arm_losses"),
            (f"{of.sweep}_errors", "where its errors are made", (*RUNS, "saturation", "gradient_bias"), "fp4.errors"),
        )
    ),
)

IMAGES = {  # {image on a page of results/: the figure that it is}
    "activations_and_norm": "instability_fig02_activations_and_norm",
    "attention": "instability_fig07_attention",
    "decisive": "student_decisive",
    **{name: name for name in (*(of.sweep for of in QUESTIONS), "fp4_scales_errors", "fp4_where_errors")},
    "gradient_bias": "instability_fig05_gradient_bias",
    "gradient_bias_at_divergence": "gradient_bias_at_divergence",
    "initialisation": "instability_fig11_initialisation",
    "interventions": "instability_fig04_interventions",
    "kernels": "mxnorm_fig08_kernels",
    "learning_rate_grid": "instability_fig06_learning_rate_grid",
    "learning_rate_window": "learning_rate_window",
    "loss": "instability_fig08_loss",
    "lr_sensitivity": "mxnorm_fig03_lr_sensitivity",
    "lr_sensitivity_paired": "lr_sensitivity_paired",
    "moe": "mxfp8_fig06_mixture_of_experts",
    "mxnorm_equivalence_losses": "mxnorm_equivalence",
    "mxnorm_pretrain_histograms": "histograms",
    "mxnorm_pretrain_losses": "loss_curves",
    "mxnorm_pretrain_norm_rms": "norm_rms",
    "olmes_seed0": "mxnorm_table02_zero_shot",
    "olmes_seed1": "zero_shot_seed1",
    "optimizers": "instability_fig10_optimizers",
    "overflow": "instability_fig03_overflow",
    "recipe_23m": "recipe_23m",
    "shakespeare": "shakespeare",
    "sharpness_at_divergence": "student_sharpness_at_divergence",
    "spike_proxy_histograms": "mxnorm_fig07_histograms",
    "spike_proxy_largest_activations": "mxnorm_fig05_outlier_feature",
    "spike_proxy_losses": "spike_proxy_losses",
    "spike_proxy_norm_rms": "mxnorm_fig06_norm_rms",
    "spike_proxy_spike_scores": "mxnorm_figa3_spike_scores",
    "train_step": "train_step_cost",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures. Return 1 if a figure whose data is in results/ could not be drawn, else 0."""
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is given")
    parser.add_argument("--pages", action="store_true", help="replace the images on results/'s pages by what is drawn")
    given = parser.parse_args(arguments)
    known = {figure.name: figure for figure in FIGURES}
    for name in set(given.names) - known.keys():
        parser.error(f"no figure is called {name}; choose from {', '.join(known)}")
    chosen = [known[name] for name in given.names] or list(FIGURES)
    backed = [figure for figure in chosen if figure.backing() and all(path.exists() for path in figure.backing())]
    failed = [figure.name for figure in backed if not draw(figure)]
    drawn = {figure.name for figure in backed} - {*failed}
    for image, name in IMAGES.items():
        if given.pages and name in drawn:
            with_palette(FOLDER / PUBLISHED / f"{name}.png").save(RESULTS / f"{image}.png", optimize=True)
    rest = [figure for figure in chosen if figure not in backed]
    if rest:
        print("\nno data in results/; these commands make the runs, in minutes on a laptop or days on GPUs:")
    for figure in rest:
        print(f"  {figure.name}: {figure.shows}\n    {figure.command}")
        print(f"    python -m {figure.module} {' '.join(figure.options(figure.runs))}")
    if failed:
        print(f"could not be drawn: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def draw(figure: Figure) -> bool:
    try:
        options = figure.options(" ".join(map(str, figure.tables)))
        importlib.import_module(figure.module).main([*options, "--name", f"{PUBLISHED}/{figure.name}"])
    except (Exception, SystemExit) as error:  # a figure that fails must not prevent the others
        if not isinstance(error, SystemExit):  # an exit has said why
            traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

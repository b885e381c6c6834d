"""What can be known to be wrong is refused when a run is planned: a short corpus, a size that blocks do not divide."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import OWN_TEXT, SMALL, corpus
from composing import compose_job
from each import each

from mxstudy.config import Pretrain, read_run
from mxstudy.data import blends
from mxstudy.launch.composed import Composed
from mxstudy.launch.plan import plan
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return a command on a corpus that is prepared."""
    folder = tmp_path_factory.mktemp("prepared")
    words = (*SMALL, *OWN_TEXT, corpus(folder), f"cache_dir={folder}/cache", f"runs_dir={folder}/runs")
    config = read_run(compose_job(*words).values)
    assert isinstance(config, Pretrain)
    assert dict(blends.prepare(config.data, config.tokenizer, Path(config.cache_dir), lambda line: None))
    return words


@each(
    "asked, line",
    [
        (
            "train.sequence_length=8192",
            "train.sequence_length: the training split is shorter than one sequence: 7879 tokens, but 8192 + 1 are",
        ),
        (
            "validation.sequences=60",
            "validation.sequences: 60 sequences of 32 tokens are more than the 43 that the validation split holds",
        ),
    ],
)
def test_a_prepared_corpus_that_is_too_short_is_refused_before_there_is_a_run(
    asked: str, line: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan([compose_job(*words, asked)])
    assert line in str(caught.value)


@each(
    "texts, held_out, most",
    [
        ({"a.txt": "é" * 10_000}, (), 401),  # the last 2 % of one text, and an EOS
        ({"a.txt": "é" * 10_000, "b.txt": "ü" * 300}, ("b.txt",), 601),
        ({f"{number}.txt": f"{number} " * 100 for number in range(250, 270)}, (), 802),  # 259 and 265, by their hashes
    ],
)
def test_a_small_text_with_too_little_for_validation_is_refused_though_it_is_not_prepared(
    texts: dict[str, str], held_out: tuple[str, ...], most: int, tmp_path: Path
) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths, kept = (",".join(str(tmp_path / name) for name in names) for names in (texts.keys() - held_out, held_out))
    words = (*SMALL, "data=text", f"data.paths=[{paths}]", f"data.validation_paths=[{kept}]", "tokenizer=bytes")
    words += (f"cache_dir={tmp_path}/cache", f"runs_dir={tmp_path}/runs")
    fits = (most - 1) // 32
    with pytest.raises(
        ConfigError, match=f"^validation.sequences: {fits + 1} .* the at most {most} tokens of text for"
    ):
        plan([compose_job(*words, f"validation.sequences={fits + 1}")])
    assert plan([compose_job(*words, f"validation.sequences={fits}")])


@each(
    "asked, block, fits",
    [
        (["model.hidden_size=48", "precision=mxfp8"], 32, 64),
        (["precision=fp8_blockwise"], 128, 128),
    ],
)
def test_a_size_that_a_norms_blocks_do_not_divide_is_refused_with_one_that_they_do(
    asked: list[str], block: int, fits: int, words: tuple[str, ...]
) -> None:
    def job(*more: str) -> Composed:
        return compose_job(*words, "norm=mxnorm_p2", "model.ffn_size=128", "train.batch_size=4", *asked, *more)

    with pytest.raises(ConfigError, match=f"blocks of {block}, as the norm needs; model.hidden_size={fits} does$"):
        plan([job()])
    assert plan([job(f"model.hidden_size={fits}")])


def test_mlps_that_cannot_be_recomputed_are_refused_before_there_is_a_run(words: tuple[str, ...]) -> None:
    """In any row of the schedule."""
    then = "precision.schedule=[{from_step: 0, plan: {}}, {from_step: 1, plan: {layers.*: nvfp4_forward_only}}]"
    assert plan([compose_job(*words, "train.recompute_mlp=1")])
    with pytest.raises(ConfigError, match=r"train.recompute_mlp: layers.0 runs on reference \(.*\), and only a fused"):
        plan([compose_job(*words, "train.recompute_mlp=1", "precision.block_size=16", then)])


def test_operands_cannot_be_told_apart_where_none_is_quantised(words: tuple[str, ...]) -> None:
    """A schedule that begins in bf16 can have them, and a baseline in bf16 may be beside an arm that has them."""
    then = "precision.schedule=[{from_step: 0, plan: {}}, {from_step: 1, plan: {layers.*: mxfp8}}]"
    by_operand = "probe.gradient_bias.every_steps=1", "probe.gradient_bias.by_operand=true"
    in_bf16 = compose_job(*words, "precision=bf16", *by_operand)
    with pytest.raises(ConfigError, match=r"^probe.gradient_bias.by_operand: true is set, and no linear is quantised"):
        plan([in_bf16])
    later = compose_job(*words, then, *by_operand)
    assert plan([later])
    assert len(plan([in_bf16, later])) == 2
    without = compose_job(*words, "precision=bf16", by_operand[0])
    assert plan([without])
    before, baseline, arm = (read_run(job.values) for job in (without, in_bf16, later))
    newly_on = study_of("pretrain").newly_on
    assert newly_on(before, baseline) == []  # a finished baseline has nothing that it did not measure
    assert newly_on(before, arm) == ["probe.gradient_bias.by_operand"]


def test_a_prepared_corpus_that_is_long_enough_is_not(words: tuple[str, ...]) -> None:
    assert len(plan([compose_job(*words, "validation.sequences=43")])) == 1

"""Bad input gives a message that says what is wrong and what would be right, and loses nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import OWN_TEXT, SMALL, call, corpus, status, the_run
from each import slow_but

# -------------------------------------------------------------------------------- refused before a run is made

SQUARE_X = "+precision.recipes.mxfp8_sr_rht_2d.forward_x.two_dimensional=true"
SHORT = ("train.sequence_length=16", "train.micro_batch_size=2")
TRANSFORM_OF_128 = "precision.recipes.mxfp8_sr_rht_2d.wgrad_transform.size=128"
REFUSED = [
    (["model.hidden_size=48", "precision=mxfp8"], "precision.block_size: 32 does not divide layers.0", "size 48"),
    (["model.hidden_size=48", "norm=mxnorm_p2"], "model.hidden_size: 48 does not divide into blocks of 32"),
    (["model.ffn_size=80", "precision=mxfp8"], "precision.block_size: 32 does not divide layers.0", "size 80"),
    (["model.num_heads=3"], "model.num_heads: hidden_size 64 does not divide into 3 heads of an even size"),
    (["norm=mxnorm_p2", "norm.p=0"], "norm.p: the exponent of the p-mean must be positive and finite, not 0.0"),
    (["norm=mxnorm_p2", "norm.p=-1"], "norm.p: the exponent of the p-mean must be positive and finite, not -1.0"),
    (["model.vocab_size=256"], "model.vocab_size: 256 is smaller than the tokenizer's 257"),
    (["tracking.uri=file:///tmp/mlruns"], "would be a file store", "give sqlite:///mlflow.db or http://HOST:PORT"),
    (["tracking.uri=ftp://host"], "tracking.uri: 'ftp://host' does not begin with one of sqlite, postgresql"),
    (["precision=mxfp8", "train.micro_batch_size=1", "train.sequence_length=40"], "train.micro_batch_size: 40 tokens"),
    (
        ["precision=mxfp8_sr_rht_2d", "train.micro_batch_size=1", "train.sequence_length=96", TRANSFORM_OF_128],
        "train.micro_batch_size: 96 tokens do not divide into a Hadamard transform of 128 (wgrad_transform)",
    ),
    (
        ["precision=mxfp8_sr_rht_2d", SQUARE_X, *SHORT, "validation.sequences=3"],
        "validation.sequences: the last micro-batch's 16 tokens do not divide into blocks of 32",
    ),
    (
        ["precision=mxfp8", *SHORT, "probe.gradient_bias.every_steps=1"],
        "train.sequence_length: 16 tokens are fewer than the 32 of one block",
    ),
    (
        ["precision=bf16", "precision.rounding=away"],
        "precision.rounding: away is set, and nothing is quantised",
        "mxfp8",
    ),
    (
        ["precision=mxfp4_rht_sr", "precision.rounding=even"],
        "precision.rounding: even is set, and every operand fixes its own (mxfp4_rht_sr: stochastic in dgrad_dh, ",
        "; leave it out, or take a variant of the recipe",
    ),
    (
        ["precision=quartet", "precision.scale_rule=rceil"],
        "precision.scale_rule: rceil is set, and every operand fixes its own (quartet: floor in forward_x, ",
    ),
    (
        ["precision=fp8_blockwise", "precision.pad_blocks=true", "precision.block_size=32"],
        "precision.block_size: 32 is set, and every operand fixes its own (fp8_blockwise: 128 in forward_x, ",
    ),
    (
        ["precision.schedule=[{plan: {layers.*: bf16}}, {from_step: 9000, plan: {layers.*: mxfp8}}]"],
        "precision.schedule: a row starts at step 9000, after the last of",
    ),
    (
        ["precision.schedule=[{plan: {layers.*: bf16}}, {from_step: 5, plan: {layers.*: mxpf8}}]"],
        "precision.schedule: from step 5, 'layers.*': 'mxpf8' is not a choice",
    ),
    (["train.device=gpu"], "train.device: 'gpu' is not a choice", "cpu"),
]


PLANS = [
    ("{layres.*: mxfp8}", "pattern 'layres.*' matches no linear", "did you mean 'layers.*'?"),
    ("{layers.*: mxpf8}", "'mxpf8' is not a choice", "did you mean 'mxfp8'?"),
    ("{layers.0.*: mxfp4, layers.*: mxfp8}", "pattern 'layers.0.*' has no effect", "'layers.*'; leave it out"),
    ("{layers.*: mxfp8, layers.7.*: bf16}", "'layers.7.*' matches no linear", "layers."),
]


@pytest.mark.integration
@pytest.mark.parametrize("number", slow_but(range(0, len(REFUSED), 6), range(len(REFUSED))))
def test_what_cannot_run_is_refused_and_nothing_is_written(number: int, here: Path) -> None:
    arguments, *words = REFUSED[number]
    code, said = call("+experiment=quickstart", "+debug=tiny", *arguments)
    assert code == 1
    assert [word for word in words if word not in said] == []
    assert len(said.splitlines()) == 1
    assert list(here.iterdir()) == []


@pytest.mark.integration
def test_a_misspelt_key_inside_a_yaml_file_is_refused(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("conf")
    (folder / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - /study: pretrain\n  - _self_\ntrain:\n  stepz: 7\n"
    (folder / "experiment" / "mine.yaml").write_text(text)
    code, said = call("+experiment=mine", f"--config-dir={folder}")
    assert (code, said) == (1, "train.stepz: no such key; did you mean 'steps'?")
    assert list(here.iterdir()) == []


@pytest.mark.integration
@pytest.mark.parametrize("number", slow_but([0], range(len(PLANS))))
def test_a_plan_that_fits_no_module_is_refused(
    number: int, here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan, *words = PLANS[number]
    folder = tmp_path_factory.mktemp("conf")
    (folder / "precision").mkdir()
    text = f"defaults:\n  - base_precision\nschedule:\n  - {{from_step: 0, plan: {plan}}}\n"
    (folder / "precision" / "mine.yaml").write_text(text)
    code, said = call("+experiment=quickstart", "+debug=tiny", "precision=mine", f"--config-dir={folder}")
    assert code == 1
    assert [word for word in words if word not in said] == [], said
    assert list(here.iterdir()) == []


# ------------------------------------------------------------------------------ found when a small text is planned


def unreadable(folder: Path) -> None:
    (folder / "corpus" / "05.txt").write_bytes(b"caf\xe9")


def empty(folder: Path) -> None:
    for path in (folder / "corpus").iterdir():
        path.write_text("")


def short(folder: Path) -> None:
    for path in (folder / "corpus").iterdir():  # one text is left, because repeated ones are dropped
        path.write_text("once and again " * 20)


TEXTS = {
    "not UTF-8": (unreadable, [], r"data: .*/corpus/05\.txt is not UTF-8: .* at byte 3"),
    "empty": (empty, [], "data: the corpus is empty: no document has text"),
    "short": (
        short,
        ["train.sequence_length=65536"],
        r"data\.paths: these files have at most [\d,]+ tokens, fewer than the 65,536 \+ 1 of train\.sequence_length",
    ),
    "no validation": (
        short,
        [],
        r"validation\.sequences: 2 sequences of 32 tokens are more than the at most 0 tokens of text for validation",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(["not UTF-8", "empty"], TEXTS))
def test_a_text_that_will_not_do_is_refused_before_a_run(name: str, here: Path) -> None:
    paths = corpus(here)
    spoil, arguments, message = TEXTS[name]
    spoil(here)
    code, said = call(*SMALL, *OWN_TEXT, *arguments, paths)
    assert code == 1
    assert re.search(message, said)
    assert [path.name for path in here.iterdir()] == ["corpus"]


# ------------------------------------------------------- found when the corpus is read: failed before the training


def as_json(folder: Path) -> None:
    for path in (folder / "corpus").iterdir():
        path.write_text(json.dumps({"text": path.read_text()}))


def nothing_as_json(folder: Path) -> None:
    empty(folder)
    as_json(folder)


CORPORA = {
    "empty": (nothing_as_json, [], "data: the corpus is empty: no document has text"),
    "short": (
        as_json,
        ["data.validation_fraction=0", "train.sequence_length=65536"],
        r"train\.sequence_length: the training split is shorter than one sequence: \d+ tokens, but 65536 \+ 1",
    ),
    "few": (
        as_json,
        ["validation.sequences=100000"],
        r"validation\.sequences: 100000 sequences of 32 tokens are more than the \d+ that the validation split holds",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(["few"], CORPORA))
def test_a_corpus_that_will_not_do_fails_before_the_training(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = corpus(here)
    spoil, arguments, message = CORPORA[name]
    spoil(here)
    assert call(*SMALL, *OWN_TEXT, "data.format=jsonl", *arguments, paths)[0] == 1
    assert status(here).state == "failed"
    assert re.search(message, status(here).reason or "")
    assert re.search(f"failed: ConfigError: {message}", capsys.readouterr().out)
    assert not (the_run(here) / "metrics.jsonl").exists()
    assert not (the_run(here) / "checkpoints").exists()

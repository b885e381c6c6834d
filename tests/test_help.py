"""`--help NAME` and the comments of `--cfg job` say what keys mean."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import call
from composing import compose, compose_job

from mxstudy.config import MXNorm
from mxstudy.config.training import AdamW
from mxstudy.help.answers import answer, commented, places
from mxstudy.help.group_choices import groups, said_of
from mxstudy.help.meanings import keys
from mxstudy.reader import ConfigError

ROOT = Path(__file__).parents[1]


def test_every_key_has_a_meaning_and_a_type_in_words() -> None:
    found = {place.path: place.key for place in places()}
    assert len(found) > 200
    assert not [path for path, key in found.items() if not key.meaning or key.type.startswith("<")]


def test_no_key_has_the_meaning_of_another() -> None:
    """If one sentence is about several keys, a key about which it says something else first has a comment."""
    begun = {place.path: re.match(r"`(\w+)`:", place.key.meaning) for place in places()}
    assert not [path for path, found in begun.items() if found and not path.endswith(found[1])]


def test_every_choice_says_what_it_is() -> None:
    assert not [
        f"{group}={choice}" for group, choices in groups().items() for choice in choices if not said_of(group, choice)
    ]


def test_the_list_of_a_group_ends_no_choice_with_a_colon() -> None:
    """It has the first paragraph alone, so a sentence that introduces a table belongs to the next."""
    begun = {group: {choice: said_of(group, choice).split("\n")[0] for choice in groups()[group]} for group in groups()}
    assert not [
        f"{group}={choice}" for group, said in begun.items() for choice, first in said.items() if first.endswith(":")
    ]


def test_the_site_says_the_same_words() -> None:
    reference: Any = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    page = "\n".join(reference["every_key"]())
    assert not [place.path for place in places() if f"| {place.key.meaning} |" not in page]
    assert said_of("norm", "mxnorm_p2") in "\n".join(reference["every_group"]())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.lr", ["learning rate at its peak", "type     number", "default  none: a choice", "of kind adamw"]),
        ("train.sequence_length", ["unit     tokens"]),
        ("hydra.launcher.time_min", ["default  1440", "unit     min", "hydra/launcher=slurm"]),
        ("precision.recipes.mine.wgrad_x.headroom", ["the fraction of the format's range that is used"]),
        (
            "norm",
            ["norm=CHOICE takes one of", "mxnorm_p2", "p = 2 (MXNorm paper", "norm.*, in pretrain", "p (no default)"],
        ),
        ("norm=mxnorm_p2", ["The RMS estimated by the p-mean of the block absmax, p = 2"]),
        ("saturation", ["probe.saturation.*, in pretrain", "Last-bin and underflow fractions", "every_steps = 0"]),
        ("validation", ["sequences = 64"]),
        ("dry_run", ["dry_run\n", "in       pretrain, prepare_data, student_teacher, fork, approximation, evaluate, "]),
        ("+experiment=quickstart", ["experiment=quickstart\n  A small Llama"]),
        ("evaluation.data_dir", ["data_dir\n  the folder with the questions"]),
        (
            "precision=nvfp4",
            ["One override turns", "\n    disable_rht                   precision.", "\n  - Rounding draws"],
        ),
    ],
)
def test_a_name_is_explained(name: str, said: list[str]) -> None:
    text = answer(name)
    assert not [part for part in said if part not in text], text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optmizer.lr", "optmizer.lr: no such key, group or probe; did you mean 'optimizer.lr'?"),
        ("norm=mxnrom_p2", "norm=mxnrom_p2: no such choice; did you mean 'mxnorm_p2'?"),
        ("nvfp4", "nvfp4: no such key, group or probe; choose from precision=nvfp4"),
        ("zzz", "zzz: no such key, group or probe; choose from experiment, sweep, "),
    ],
)
def test_an_unknown_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        answer(name)


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help", "norm.p", "seed") == (0, "")
    assert capsys.readouterr().out == f"{answer('norm.p')}\n\n{answer('seed')}\n"
    assert call("--help", "zzz")[1].startswith("zzz: no such key")


def test_a_meaning_is_the_comment_or_what_follows_the_name() -> None:
    assert {key.name: key.meaning for key in keys(AdamW)}["lr"] == "learning rate at its peak"
    assert {key.name: key.default for key in keys(AdamW)}["betas"] == "[0.9,0.95]"
    assert {key.name: key.meaning for key in keys(MXNorm)} == {
        "eps": "keeps the divisor above 0",
        "kind": "set by the choice of the group",
        "p": "exponent of the p-mean",
        "fold_gain_in_dgrad": "dgrad reads W * gain too",
    }


@pytest.mark.parametrize("experiment", ["quickstart", "student_teacher"])
def test_a_config_is_commented_and_stays_the_same(experiment: str) -> None:
    values = compose_job(f"+experiment={experiment}", "precision=mxfp8").values
    text = commented(yaml.safe_dump(values, sort_keys=False))
    assert yaml.safe_load(text) == values
    lines = [line for line in text.splitlines() if re.match(r" *\w+:", line)]
    assert not [line for line in lines if "  # " not in line]
    assert ("  p: 2  # exponent of the p-mean" in text) == ("kind: mxnorm" in text)


def test_a_recipe_of_a_config_is_commented() -> None:
    values = compose_job("+experiment=quickstart", "precision=mxfp4_rht_sr").values
    text = commented(yaml.safe_dump(values, sort_keys=False))
    assert yaml.safe_load(text) == values
    assert "        headroom: 0.75  # the fraction of the format's range that is used, for example 3/4" in text


def test_a_value_of_several_lines_stays_whole() -> None:
    values = {"study": "pretrain", "runs_dir": "a long name of words " * 8, "seed": 3}
    text = commented(yaml.safe_dump(values, sort_keys=False))
    assert yaml.safe_load(text) == values
    assert text.endswith("seed: 3  # draws the initial weights, and the random bits of stochastic casts")


@pytest.mark.integration
def test_cfg_job_prints_meanings_beside_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("+experiment=quickstart", "norm=mxnorm_p2", "--cfg", "job") == (0, "")
    printed = capsys.readouterr().out
    assert "  p: 2  # exponent of the p-mean\n" in printed
    assert yaml.safe_load(printed)["norm"]["p"] == 2


@pytest.mark.integration
def test_cfg_job_prints_what_every_run_of_a_command_would_get(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("+experiment=generate", "+debug=tiny", "checkpoint=RUN", "runs_dir='${cache_dir}/runs'")
    assert call(*asked, 'prompt="two\nlines",b', "--cfg=job", "--resolve") == (0, "")
    printed = capsys.readouterr().out
    configs = [*yaml.safe_load_all(printed)]
    assert [(one["experiment"], one["prompt"], one["runs_dir"]) for one in configs] == [
        ("generate", "two\nlines", ".cache/runs"),
        ("generate", "b", ".cache/runs"),
    ]
    (planned,) = compose("+experiment=generate", "+debug=tiny", "checkpoint=RUN", "prompt=b", "runs_dir=.cache/runs")
    assert configs[1] == planned.values
    assert call("+sweep=quickstart", "+debug=tiny", "data=fineweb_edu", "-c", "job") == (0, "")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "--- # precision=bf16 norm=rmsnorm",
        "# debug: HuggingFaceFW/fineweb-edu, its first 500 documents; data.max_documents takes others",
    ]
    assert len([line for line in said if line.startswith("---")]) == 4


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optimizer.lr=-1"], "optimizer.lr: must be positive and finite, not -1.0"),
        (["seed=-1"], "seed: must lie in 0 .. 2**64 - 1, not -1"),
        (
            ["norm=mxnorm_p1,mxnorm_p3"],
            "1 of 2 jobs cannot run, so none was started:\n  norm=mxnorm_p3: no such",
        ),
        (["optimizer.nope=1,2"], "optimizer.nope: no such key"),
    ],
)
def test_cfg_job_refuses_what_a_run_would_refuse(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = call("+experiment=quickstart", *words, "--cfg", "job")
    assert code == 1
    assert said.startswith(line)
    assert capsys.readouterr().out == ""

"""Blends on the command line have corpora by their names in conf/data, or one's own, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composing import compose_job, validated
from each import slow_but

from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration

PHASES = "data.phases=[{weights: {pysource: 3, starcoder: 1}}, {from_fraction: 0.6, weights: {%s: 1}}]"
OWN = "+data.corpora.mine={kind: files, format: text, paths: [a.txt]}"


def blended(last: str, *overrides: str) -> Any:
    return validated(compose_job("+experiment=quickstart", "data=blend", PHASES % last, *overrides)).data


@pytest.fixture
def own_files(here: Path) -> None:
    """Write the files that a user's corpora name."""
    (here / "a.txt").write_text("a b c " * 100_000)  # enough for validation
    (here / "a.jsonl").write_text('{"text": "%s"}' % ("a b c " * 1000))


@pytest.mark.usefixtures("own_files")
def test_a_blend_takes_any_choice_of_data_by_its_name() -> None:
    data = blended("fineweb_edu")
    alone = {
        name: validated(compose_job("+experiment=quickstart", f"data={name}")).data
        for name in ("pysource", "starcoder", "fineweb_edu")
    }
    assert data.corpora == alone
    assert blended("mine", OWN).corpora["mine"].paths == ("a.txt",)
    one = compose_job("+experiment=quickstart", "data=blend", PHASES % "fineweb_edu")
    assert [group for group in one.choices if group.startswith("data")] == ["data"]


def test_a_blend_names_the_corpus_that_is_too_short(here: Path) -> None:
    (here / "a.txt").write_text("a b c " * 1000)
    with pytest.raises(ConfigError, match=r"^validation\.sequences: .* tokens of text for validation of mine; ask"):
        blended("mine", OWN)


@pytest.mark.usefixtures("own_files")
def test_a_corpus_of_a_blend_is_changed_with_a_plus() -> None:
    assert blended("jsonl", "+data.corpora.jsonl.paths=[a.jsonl]").corpora["jsonl"].paths == ("a.jsonl",)
    fractions = [f"+data.corpora.{name}.validation_fraction=0.1" for name in ("pysource", "starcoder")]
    assert blended("pysource", *fractions).validation_fraction == 0.1


@pytest.mark.parametrize(
    ("last", "message"),
    slow_but(
        [("finewb_edu", "data.phases[1].weights.finewb_edu: no such corpus; did you mean 'fineweb_edu'?")],
        [
            ("finewb_edu", "data.phases[1].weights.finewb_edu: no such corpus; did you mean 'fineweb_edu'?"),
            ("pysource_phases", "data.corpora.pysource_phases.kind: 'blend' is not a choice; choose from pysource, "),
            (
                "base_blend",
                "data.phases[1].weights.base_blend: no such corpus; choose from fineweb_edu, hugging_face, jsonl, ",
            ),
            ("jsonl", "data.corpora.jsonl.paths: missing; it has no default"),
        ],
    ),
)
def test_a_blend_of_what_is_no_corpus_is_refused(last: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        blended(last)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_phase_that_no_step_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data\.phases\[1\]: no step reaches it: it begins at step 1 of 1"):
        validated(compose_job("+experiment=quickstart", "data=pysource_phases", "train.steps=1"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=blend"], "data.phases: missing; it has no default"),
        (["data=blend", "data.phases=3"], "data.phases: 3 is not a list"),
        (["data=blend", "data.phases=[3]"], "data.phases[0]: 3 is not a mapping"),
        (
            ["data=blend", "data.phases=[{weights: [pysource]}]"],
            "data.phases[0].weights: ['pysource'] is not a ",
        ),
        (
            ["data=blend", "data.phases=[{weights: {pysource: 1}}]", "data.corpora=3"],
            "data.corpora: 3 is not a mapping",
        ),
        (
            ["+data.phases=[{weights: {pysource: 1}}]"],
            "data.phases: no such key; choose from ",
        ),
    ],
)
def test_what_is_no_blend_is_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(compose_job("+experiment=quickstart", *words))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)

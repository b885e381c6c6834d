"""Fields of a flat config decide a run's numbers if its fingerprint hashes them, or hashes something for them."""

from __future__ import annotations

import math

from arm_configs import pretrain

from mxstudy.config.deciding import cosmetic_columns, deciding


def test_a_field_that_a_table_lacks_has_its_default() -> None:
    assert deciding(pretrain()) == deciding(pretrain(precision__scale_rule="rceil", norm__eps=math.nan))
    assert deciding(pretrain())["precision.block_size"] == 32.0
    assert deciding(pretrain(removed_long_ago=3))["removed_long_ago"] == 3.0


def test_a_list_is_one_value() -> None:
    """The first two tasks of the default are not the default."""
    tasks = {"study": "evaluate", "evaluation.tasks.0": "arc_challenge", "evaluation.tasks.1": "arc_easy"}
    assert deciding(tasks)["evaluation.tasks"] == (("0", "arc_challenge"), ("1", "arc_easy"))
    assert len(deciding({"study": "evaluate"})["evaluation.tasks"]) == 10  # type: ignore[arg-type]


def test_a_recipe_counts_for_what_it_computes_and_not_for_its_name() -> None:
    def of(name: str, fmt: str) -> object:
        own = {f"precision.recipes.{name}.forward_x.format": fmt}
        return deciding(pretrain(precision=name) | own)

    assert of("mine", "E4M3") == of("yours", "E4M3") != of("mine", "E5M2")


def test_a_field_of_a_recipe_at_its_default_is_as_one_that_is_not_written() -> None:
    """A run from before a field was added to casts stays in the arm of a later run."""

    def of(**fields: object) -> object:
        own = {f"precision.recipes.mine.forward_x.{key}": value for key, value in {"format": "E2M1", **fields}.items()}
        return deciding(pretrain(precision="mine") | own)

    assert of() == of(chain="inference", largest_scale=448, headroom=1.0) == of(**{"candidates.0": 1.0})
    assert of() != of(headroom=0.75)


def test_an_earlier_name_of_a_backend_is_the_same() -> None:
    assert deciding(pretrain(precision__backend="joined")) == deciding(pretrain(precision__backend="fused"))


def test_what_a_fingerprint_hashes_in_place_of_a_field_parts_arms() -> None:
    assert "config.checkpoint" in cosmetic_columns("evaluate")
    assert "checkpoint" in deciding({"study": "evaluate", "checkpoint": "a"})
    assert "processes" not in deciding({"study": "evaluate", "processes": 4})


def test_a_corpus_of_a_blend_counts_as_it_does_alone() -> None:
    """A data set is identified by its name and split, not by the folder that it is read from."""

    def of(**changes: object) -> object:
        own = {"kind": "hugging_face", "name": "a/b", "mirror": None} | changes
        corpus = {f"data.corpora.web.{key}": value for key, value in own.items()}
        phases = {"data.kind": "blend", "data.phases.0.weights.web": 1.0}
        return deciding({key: value for key, value in pretrain().items() if key != "data.kind"} | phases | corpus)

    assert of() == of(mirror="/here") == of(validation_fraction=0.02)
    assert of() != of(name="a/c")
    assert of() != of(validation_fraction=0.1)

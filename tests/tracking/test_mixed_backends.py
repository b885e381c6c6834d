"""Runs know their backends, and a sentence names arms that ran on different ones."""

from __future__ import annotations

import pytest
from each import each
from mirrored import send, the_run
from tracked import training_row, write_rows

from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mixed_backends import all_backends, backends_by_step, different_backends
from mxstudy.tracking.provenance import provenance

QUICKSTART = {
    "bf16 rmsnorm": "reference",
    "mxfp8 rmsnorm": "fused",
    "mxfp8 mxnorm_p1": "fused",
    "mxfp8 mxnorm_p2": "fused",
}


def began_on(folder: RunFolder, *backends: str | None) -> RunFolder:
    """Return a run that began on the first of these and went on, from a checkpoint, on each of the others."""
    first, *later = ({} if backend is None else {"backend": backend} for backend in backends)
    folder.set_provenance(folder.provenance() | first)
    (folder.checkpoints / "step_00000001").mkdir(parents=True, exist_ok=True)
    for again in later:
        folder.go_on(folder.config(), provenance() | again)
    return folder


def test_each_backend_is_named_once_and_none_is_made_up() -> None:
    assert all_backends(["reference", None, "fused, reference", "fused"]) == "fused, reference"
    assert all_backends([None, None]) is None


def test_the_backends_of_a_schedule_are_said_by_step() -> None:
    rows = [(0, "reference"), (100, "reference"), (500, "fused"), (900, "fused, reference")]
    assert backends_by_step(rows[:2]) == "reference"
    assert backends_by_step([(0, None)]) is None
    said = backends_by_step(rows)
    assert said == "reference then from step 500 fused then from step 900 fused, reference"
    assert all_backends([said, None, said]) == said  # the run continued
    assert all_backends([said, "native"]) == "fused, native, reference"


def test_the_sentence_names_the_few_and_the_option_that_puts_all_on_one() -> None:
    assert different_backends(QUICKSTART.items()) == (
        "The arms run on different backends (bf16 rmsnorm: reference; 3 others: fused), which differ in the order of "
        "sums alone; precision.backend=reference puts all on one."
    )
    seeds = [(arm, backend) for arm, backend in QUICKSTART.items() for _ in range(9)]
    assert different_backends(seeds) == different_backends(QUICKSTART.items())
    two = different_backends(list(QUICKSTART.items())[:2], remedy="")
    assert two is not None
    assert two.endswith("(bf16 rmsnorm: reference; mxfp8 rmsnorm: fused), which differ in the order of sums alone.")


def test_many_arms_are_counted() -> None:
    arms = [(f"lr={n}", "reference" if n < 5 else "fused, reference" if n < 7 else "fused") for n in range(20)]
    sentence = different_backends(arms)
    assert sentence is not None
    assert "(lr=5, lr=6: fused, reference; 5 arms: reference; 13 others: fused)" in sentence


@each("backends", [["fused", "fused"], ["fused", None], [None, None], []])
def test_nothing_is_said_of_arms_on_one_backend_nor_of_what_is_not_known(backends: list[str | None]) -> None:
    assert different_backends([(f"lr={n}", backend) for n, backend in enumerate(backends)]) is None


def test_a_folder_knows_every_backend_that_its_run_was_begun_on(folder: RunFolder) -> None:
    assert folder.backend() is None  # as in a run from before there were any
    assert began_on(folder, "fused", None, "reference").backend() == "fused, reference"


def test_a_run_that_begins_again_is_on_its_new_backend_alone(folder: RunFolder) -> None:
    folder.set_provenance(folder.provenance() | {"backend": "fused", "resumed": [{"backend": "native"}]})
    folder.go_on(folder.config(), provenance() | {"backend": "reference"})
    assert folder.backend() == "reference"


@pytest.mark.integration
def test_the_tag_in_mlflow_follows_a_run_to_another_machine(uri: str, folder: RunFolder) -> None:
    write_rows(began_on(folder, "fused"), [training_row(0)])
    send(uri, folder, state="preempted", covered=1)
    assert the_run(uri).data.tags["backend"] == "fused"
    write_rows(began_on(folder, "fused", "native"), [training_row(1)], resumed_from=1)
    send(uri, folder)
    assert the_run(uri).data.tags["backend"] == "fused, native"


@pytest.mark.integration
def test_a_run_that_says_no_backend_has_no_tag(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(0)])
    send(uri, folder)
    assert "backend" not in the_run(uri).data.tags

"""An override with a default value is known to undo what an experiment or a sweep sets, or to undo nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call
from composing import compose, compose_job

RCEIL = "precision.scale_rule=rceil"  # the default
STUDENT = ("+experiment=student_teacher", "precision=nvfp4", "student.gain=bf16")  # its fidelity sets the rule floor


@pytest.mark.integration
@pytest.mark.parametrize("line", [RCEIL, f"++{RCEIL}"])
def test_a_default_undoes_what_an_experiment_sets(line: str) -> None:
    assert compose_job(*STUDENT, line, "seeds=[0]").undoes == {line}
    assert compose_job(*STUDENT, "fidelity=none", line).undoes == set()
    assert compose_job(*STUDENT, "precision.scale_rule=ceil").undoes == set()


@pytest.mark.integration
def test_a_default_undoes_what_a_precision_or_a_sweep_sets() -> None:
    blocks, size = "precision.skip_blocks=0", "precision.block_size=32"
    assert compose_job("+experiment=fp4_recipes", "precision=nvfp4", blocks).undoes == {blocks}
    assert compose_job("+experiment=fp4_recipes", "precision=quartet", blocks).undoes == set()
    composed = compose("+sweep=fp4_scales", size, each_value_once=True)
    assert {line for job in composed for line in job.undoes} == {size}


@pytest.mark.integration
def test_a_default_that_undoes_something_is_accepted_although_no_operand_takes_it(here: Path) -> None:
    words = (*STUDENT, "dry_run=true", "tracking=none", "seeds=[0]")
    assert call(*words, RCEIL) == (0, "")
    code, said = call(*words, RCEIL, "fidelity=none")
    assert code == 1
    assert said.startswith("precision.scale_rule: rceil is set, and no operand of nvfp4 (forward_x, ")
    assert said.endswith("has E8M0 scales to round by it; leave it out, or take another recipe")

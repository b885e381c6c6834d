import pandas as pd
import pytest

from mxstudy.studies.summary import baseline_arm

RUNS = pd.DataFrame(
    {
        "label": ["bf16 rmsnorm", "mxfp8 rmsnorm", "mxfp8 mxnorm_p1"],
        "choice.norm": ["rmsnorm", "rmsnorm", "mxnorm_p1"],
        "choice.precision": ["bf16", "mxfp8", "mxfp8"],
    }
)


def test_the_baseline_is_the_first_arm_with_all_its_choices(capsys):
    assert baseline_arm(RUNS, {"norm": "rmsnorm", "precision": "mxfp8"})["label"] == "mxfp8 rmsnorm"
    assert baseline_arm(RUNS, {})["label"] == "bf16 rmsnorm"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("baseline", [{"nrom": "rmsnorm"}, {"norm": "layernorm"}])
def test_a_baseline_that_no_arm_has_is_said(baseline, capsys):
    assert baseline_arm(RUNS, baseline)["label"] == "bf16 rmsnorm"
    assert "no arm has" in capsys.readouterr().out

"""Tab completion offers the words that can follow, and the shells' scripts work when called as a shell calls them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_scripts import ROOT

from mxstudy.completion import SCRIPTS, main
from mxstudy.completion.candidates import LAUNCH, OPTIONS, candidates, keys
from mxstudy.help.answers import places
from mxstudy.launch import commands
from mxstudy.reader import ConfigError
from mxstudy.words import OPTIONS as KNOWN

LOADED = """
import json, sys
sys.argv = ["mxstudy", "completion", "--", "optimizer.l"]
from mxstudy.__main__ import main
main()
print(json.dumps(list(sys.modules)))
"""
BASH = """
source <("$PYTHON" -m mxstudy completion bash)
compopt() { :; }
COMP_LINE=$1 COMP_POINT=${#1}
_mxstudy_python
printf '%s|' "${COMPREPLY[@]}"
"""
ZSH = """
compdef() { :; }
source <("$PYTHON" -m mxstudy completion zsh)
compset() { :; }
_files() { print -rn -- "files|" }
compadd() { shift $@[(ie)--]; (( $# )) && printf '%s|' $@ }
words=("${(@s: :)1}") CURRENT=$#words PREFIX=$words[-1]
_mxstudy_python
"""
ASKED = {  # {command: what bash and zsh offer}
    "-m mxstudy +experiment=quick": ("quickstart |", "+experiment=quickstart|"),
    "-m mxstudy +experiment=quickstart norm=rmsnorm,mxnorm_po": (
        "rmsnorm,mxnorm_postround |",
        "norm=rmsnorm,mxnorm_postround|",
    ),
    "-m mxstudy optimizer.l": ("optimizer.lr=|", "optimizer.lr=|"),
    "-m mxstudy data.paths=bo": ("|", "files|"),
}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["+exp"], {"+experiment="}),
        (["norm=rmsn"], {"norm=rmsnorm", "norm=rmsnorm_folded"}),
        (["norm=rmsnorm,rmsn"], {"norm=rmsnorm,rmsnorm_folded"}),
        (["hydra/l"], {"hydra/launcher="}),
        (["optimi"], {"optimizer=", "optimizer."}),
        (["+experiment=moe", "model.moe.to"], {"model.moe.top_k="}),
        (["data.corpora.books.pa"], {"data.corpora.books.paths="}),
        (["precision.schedule"], {"precision.schedule="}),
        (["train.compile="], {"train.compile=true", "train.compile=false"}),
        (["precision.gain="], {f"precision.gain={gain}" for gain in ("fp32", "bf16", "mx", "null")}),
        (["+launch="], {f"+launch={command}" for command in ("status", "cancel", "retry")}),
        (["+experiment=moe", "--c"], {"--cfg"}),
        (["+experiment=moe", "--cfg", ""], {"job"}),
        (["--help", "optimizer.l"], {"optimizer.lr"}),
        (["--help", "norm=mxnorm_p2"], {"norm=mxnorm_p2"}),
        (["repo"], {"report"}),
        (["figure", "loss_cu"], {"loss_curves"}),
        (["completion", ""], {"bash", "zsh"}),
        (["report", "--ru"], set()),
        (["optimizer.lr="], set()),
    ],
)
def test_what_can_follow(words: list[str], found: set[str]) -> None:
    offered = candidates(words, SCRIPTS)
    assert set(offered) == found
    assert len(offered) == len(found)


def test_every_key_is_one_that_help_knows() -> None:
    assert len(keys()) > 150
    assert {*keys()} <= {place.path for place in places()}


def test_commands_and_options_are_those_of_the_command_line() -> None:
    assert {*LAUNCH["launch"]} == {*commands.COMMANDS}
    assert {*OPTIONS} <= KNOWN


def test_another_shell_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^completion fish: no such shell; choose from bash, zsh$"):
        main(["fish"])


@pytest.mark.integration
def test_an_answer_loads_neither_torch_nor_hydra() -> None:
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    first, modules = said.splitlines()
    assert first == "optimizer.lr="
    assert not {"torch", "hydra", "omegaconf", "mlflow", "numpy", "pandas", "yaml"} & {*json.loads(modules)}


@pytest.mark.integration
@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("zsh", ZSH)])
def test_a_shell_offers_them(shell: str, program: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell} here")
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    for words, offered in ASKED.items():
        command = [found, "-c", program, shell, f"{sys.executable} {words}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert (done.stdout, done.stderr) == (offered[shell == "zsh"], ""), words

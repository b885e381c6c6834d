"""`import mxstudy` has its names, and gives a notebook what it calls."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
import torch
from each import each

import mxstudy
import mxstudy.library
from mxstudy import config
from mxstudy.launch.start import Launched
from mxstudy.model.decoder import Decoder
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder

TINY = ("+experiment=quickstart", "+debug=tiny", "norm=mxnorm_p2", "precision=mxfp8")


@pytest.mark.integration
def test_every_name_is_there_for_people_and_for_type_checkers() -> None:
    assert all(getattr(mxstudy, name) is not None for name in dir(mxstudy))
    tree = ast.parse(Path(str(mxstudy.__file__)).read_text())
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    places = {
        alias.name: str(node.module).removeprefix("mxstudy").lstrip(".") for node in typed for alias in node.names
    }
    assert places == mxstudy.PLACES | dict.fromkeys(mxstudy.PACKAGES, "")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mxstudy' has no attribute 'quantise'"):
        mxstudy.quantise  # type: ignore[attr-defined]  # noqa: B018


def test_a_norm_of_the_library_normalises() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert mxstudy.MXNorm(256, p=2.0)(3 * x).square().mean().item() == pytest.approx(1, rel=0.02)


def test_a_linear_is_initialised_and_takes_a_recipe() -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    linear = mxstudy.NormLinear(mxstudy.MXNorm(256, p=2.0), 64)
    plain = linear(x)
    linear.gemms = config.PRECISIONS["mxfp4"].filled(config.BlockCast())
    assert 0.05 < ((linear(x) - plain).std() / plain.std()).item() < 0.3


@pytest.mark.integration
def test_the_config_of_a_command_and_its_model() -> None:
    composed = mxstudy.compose(*TINY, "seed=3")
    assert isinstance(composed, config.Pretrain)
    assert (composed.seed, composed.norm) == (3, config.MXNorm(p=2.0))
    model = mxstudy.build_model(composed)
    drawn = Decoder(composed.model, composed.norm, composed.precision.settings, torch.bfloat16)
    drawn.init_weights(3)
    assert all(map(torch.equal, model.state_dict().values(), drawn.state_dict().values()))
    assert {"E4M3"} == {cast.format for _, cast in model.get_submodule("layers.0").attention.wo.gemms.casts()}
    tokens = torch.arange(64)[None]
    model(tokens, tokens, divisor=64).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*TINY, "seed=0,1"), r"seed=0,1: starts 2 runs; give each key one value$"),
        (("+experiment=quickstrat",), r"^\+?experiment=quickstrat: no such choice; did you mean 'quickstart'"),
        ((*TINY, "optimizer.lr=fast"), r"^optimizer\.lr: "),
        ((*TINY, "--help"), r"^--help: is an option of the command line; here are only GROUP=CHOICE and KEY=VALUE$"),
        ((*TINY, "--cfg", "job"), r"^--cfg: is an option"),
        ((" ".join(TINY),), r": several overrides in one word; make each a word of its own$"),
    ],
)
def test_words_that_start_no_run_are_refused(words: tuple[str, ...], error: str) -> None:
    """The refusal is one line, without the frames of Hydra in which it arose."""
    with pytest.raises(ConfigError, match=error) as caught:
        mxstudy.compose(*words)
    assert caught.value.__cause__ is None


@pytest.mark.integration
def test_a_caller_who_uses_hydra_has_his_own_afterwards(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("key: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        mxstudy.compose(*TINY)
        assert hydra.compose("mine") == {"key": 1}


@pytest.mark.integration
def test_a_text_stands_as_it_does_on_the_command_line() -> None:
    composed = mxstudy.compose("+experiment=generate", "checkpoint=RUN", "prompt=def quicksort(")
    assert isinstance(composed, config.Generate)
    assert composed.prompt == "def quicksort("


@pytest.mark.integration
@each(("code", "error"), [(130, KeyboardInterrupt), (1, RuntimeError), (143, RuntimeError)])
def test_a_run_that_does_not_end_is_an_exception(
    code: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxstudy.library, "launch", lambda *_: Launched(code, []))
    with pytest.raises(error):
        mxstudy.run(*TINY)


def test_a_thread_that_no_signal_reaches_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="called in another thread than the main one"):
        pool.submit(mxstudy.run, *TINY).result()


@pytest.mark.integration
def test_only_a_pre_training_has_a_decoder() -> None:
    with pytest.raises(ConfigError, match="study: approximation has no decoder"):
        mxstudy.build_model(mxstudy.compose("+experiment=approximation", "+debug=tiny"))


@pytest.mark.integration
def test_a_run_gives_its_folder(trained: RunFolder, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is finished, so that nothing is trained. The notebooks train."""
    monkeypatch.chdir(trained.path.parents[2])
    (folder,) = mxstudy.run(*TINY, "runs_dir=runs", "tracking=none", cache)
    assert folder.resolve() == trained.path.resolve()
    assert len(mxstudy.results.load([folder], "metrics")) == 10

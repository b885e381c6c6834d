"""Hydra still has the internal parts that mxstudy.compat.hydra uses, and they do what it expects."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from composing import compose, handed_over
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf

from mxstudy.cli.through_hydra import callers_hydra_aside
from mxstudy.compat import hydra
from mxstudy.compat.hydra import (
    CHOSEN_ALREADY,
    NOTHING_TO_OVERRIDE,
    map_choices_if_asked,
    parse,
    product,
)

QUICK = "+experiment=quickstart"


@pytest.mark.integration
def test_the_product_of_overrides_is_hydras() -> None:
    loader, _, _ = handed_over(QUICK)
    assert product(loader, ["a=1,2", "b=3", "b=4,5"]) == [
        ["a=1", "b=4"],
        ["a=1", "b=5"],
        ["a=2", "b=4"],
        ["a=2", "b=5"],
    ]


@pytest.mark.integration
def test_a_command_composes_its_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed, load = [], ConfigLoaderImpl.load_configuration

    def counted(self: ConfigLoaderImpl, **asked: object) -> object:
        composed.append(asked["overrides"])
        return load(self, **asked)  # type: ignore[arg-type]

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    handed_over(QUICK)
    assert len(composed) == 1
    assert "hydra.mode=MULTIRUN" in composed[0]


def test_what_a_repository_is_asked_for_is_what_ours_knows() -> None:
    assert {name for name in vars(IConfigRepository) if not name.startswith("_")} == {
        *("get_schema_source", "load_config", "group_exists", "config_exists"),
        *("get_group_options", "get_sources", "initialize_sources"),
    }
    assert list(inspect.signature(ConfigRepository.load_config).parameters) == ["self", "config_path"]
    assert list(inspect.signature(ConfigRepository.initialize_sources).parameters) == ["self", "config_search_path"]


@pytest.mark.integration
def test_a_file_is_read_once_for_two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    read, load = [], ConfigRepository.load_config

    def counted(self: ConfigRepository, config_path: str) -> object:
        read.append(config_path)
        return load(self, config_path)

    monkeypatch.setattr(ConfigRepository, "load_config", counted)
    loader, master, jobs = handed_over(QUICK, "seed=1,2")
    configs = [loader.load_sweep_config(master, list(job)) for job in jobs]
    assert len(read) == len(set(read))
    known, read[:] = set(read), []
    loader.repository = loader.repository.repository  # Hydra's own
    loader.load_sweep_config(master, list(jobs[0]))
    assert known >= set(read) != set()
    assert [config.seed for config in configs] == [1, 2]


def test_only_a_list_with_a_reference_asks_for_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config": "defaults: [width: one, height: '${width}', depth: one]"}
    files |= {
        f"{group}/{choice}": f"is: {choice}" for group in ("width", "height", "depth") for choice in ("one", "two")
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    asked = []
    monkeypatch.setattr(hydra, "MAP", lambda *given, own=hydra.MAP: asked.append(given) or own(*given))
    map_choices_if_asked()
    with callers_hydra_aside(), initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose_hydra("config", ["width=two"])
    assert config == {"width": {"is": "two"}, "height": {"is": "two"}, "depth": {"is": "one"}}
    assert len(asked) == 1


@pytest.mark.integration
def test_a_config_from_memory_is_a_copy() -> None:
    loader, _, _ = handed_over(QUICK)
    first = loader.repository.load_config(config_path="config")
    before = copy.deepcopy(first.config)
    first.config.clear()
    assert loader.repository.load_config(config_path="config").config == before


@pytest.mark.integration
@pytest.mark.parametrize(
    ("word", "pattern"), [("norm=rmsnorm", NOTHING_TO_OVERRIDE), ("+norm=mxnorm_p1", CHOSEN_ALREADY)]
)
def test_hydras_words_name_the_group(word: str, pattern: str) -> None:
    loader, master, _ = handed_over(QUICK)
    words = [word] if word.startswith("norm") else [QUICK, word]
    with pytest.raises(ConfigCompositionException, match=pattern):
        loader.load_configuration("config", words, run_mode=master.hydra.mode)


def test_hydra_starts_without_anything_of_ours_that_is_slow() -> None:
    code = """if True:
        import sys
        import hydra.main, hydra._internal.hydra
        before = set(sys.modules)
        import hydra_plugins.mxstudy_launcher
        print(*sorted(set(sys.modules) - before))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("mxstudy")}
    assert ours == {"mxstudy", "mxstudy.compat", "mxstudy.compat.hydra"}
    assert not {"torch", "pandas"} & set(done.stdout.split())


@pytest.mark.integration
def test_a_sweep_is_composed_by_ours(tmp_path: Path) -> None:
    assert [one.values["seed"] for one in compose(QUICK, "seed=3,4")] == [3, 4]


def test_an_override_is_read_as_hydra_reads_it() -> None:
    loader, _, _ = handed_over(QUICK)
    assert parse(loader, "seed=3") == ("seed=3", "seed", True, 3)
    assert parse(loader, "+a.b=[1,2]") == ("+a.b=[1,2]", "a.b", False, None)
    assert parse(loader, "~norm") == ("~norm", "norm", False, None)
    assert parse(loader, "hydra.verbose=true").changes is False


@pytest.mark.integration
def test_files_that_are_merged_in_one_call_give_hydras_config() -> None:
    loader, master, (job,) = handed_over(QUICK)
    loaders = (loader, ConfigLoaderImpl(loader.config_search_path))
    ours, hydras = (OmegaConf.to_yaml(one.load_sweep_config(master, list(job))) for one in loaders)
    assert ours == hydras


def test_a_file_that_cannot_be_merged_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [one, two, _self_]")
    (tmp_path / "one.yaml").write_text("# @package _global_\na: {b: 1}\nc: 1")
    (tmp_path / "two.yaml").write_text("# @package _global_\nc: 2\na: [1]\nb: ${missing}")
    with callers_hydra_aside(), initialize_config_dir(str(tmp_path), version_base="1.3"):
        loader = hydra.LoaderWithMemory(GlobalHydra.instance().config_loader().config_search_path)
        with pytest.raises(ConfigCompositionException, match="In 'two': ConfigTypeError"):
            loader.load_configuration("config", [], run_mode=RunMode.RUN)

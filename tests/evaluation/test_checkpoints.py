"""A trained run is found and loaded by each of its names."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mxstudy import config
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.checkpoints import build, describe, find, load
from mxstudy.evaluation.hugging_face import export
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import BlockCast
from mxstudy.reader import ConfigError
from mxstudy.studies.pretrain import run as pretrain
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.checkpoint import CheckpointError, read_about

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
TOKENS = torch.arange(64)[None]


@pytest.fixture(scope="module")
def run(trained: RunFolder) -> RunFolder:
    trained.update(mlflow_run_id="abcdef" * 5)
    return trained


@pytest.mark.slow
def test_each_name_of_a_run_finds_its_newest_checkpoint(run: RunFolder) -> None:
    newest, runs_dir = run.checkpoints / "step_00000010", run.path.parents[1]
    names = [run.path, newest, run.status().fingerprint, run.status().fingerprint[:6], "abcdef" * 5]
    shutil.copytree(newest, newest.with_name(f"{newest.name}.bak"))
    assert {find(str(name), runs_dir) for name in names} == {newest}


def test_what_names_nothing_is_refused(run: RunFolder, tmp_path: Path) -> None:
    runs_dir = run.path.parents[1]
    for text in ("nowhere", "x" * 300, run.status().fingerprint[:5], "abcdef"):
        with pytest.raises(
            ConfigError, match=f"'{text}' is not a run's folder, and no run in .* has such a fingerprint"
        ):
            find(text, runs_dir)
    with pytest.raises(ConfigError, match="neither the folder of a run, nor of a checkpoint, nor"):
        find(str(tmp_path), runs_dir)
    queued = RunFolder.create(tmp_path / "queued", run.config(), "e" * 64, run.provenance())
    with pytest.raises(ConfigError, match="has none yet; its state is queued"):
        find(str(queued.path), runs_dir)


def test_the_decoder_is_the_one_that_was_trained(run: RunFolder) -> None:
    trained = describe(path := find(str(run.path), Path("runs")))
    settings = run.config()
    assert isinstance(settings, config.Pretrain)
    assert (trained.model, trained.norm, trained.precision) == (settings.model, settings.norm, settings.precision)
    assert (trained.max_length, trained.compute) == (64, "bf16")
    assert trained.tokenizer.encode_batch(["h\u00e9"])[0].tolist() == [*"h\u00e9".encode()]
    decoder = load(path, trained, CPU)
    fresh = pretrain.initial_model(settings, CPU)
    assert {name for name, _ in decoder.named_parameters()} == {name for name, _ in fresh.named_parameters()}
    assert not torch.equal(decoder.output.weight, fresh.output.weight)
    assert decoder.layers[0].attention.wqkv.gemms.format("forward_x") == "E4M3"


def test_what_was_trained_with_dropout_is_evaluated_without_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find(str(run.path), Path("runs"))
    without = load(path, describe(path), CPU)
    about = read_about(path)
    about["config"]["model"]["dropout"] = 0.2
    monkeypatch.setattr(checkpoints, "read_about", lambda path: about)
    decoder = load(path, describe(path), CPU)
    assert [block.backend.name for block in decoder.layers] == ["fused"] * 3
    with torch.no_grad():
        assert torch.equal(decoder(TOKENS), without(TOKENS))


def test_another_norm_and_precision_in_place_of_those(run: RunFolder) -> None:
    trained = describe(path := find(str(run.path), Path("runs")))
    plain = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "bf16"}),))
    ours, exact = load(path, trained, CPU), load(path, replace(trained, norm=config.RMSNorm(), precision=plain), CPU)
    reference = Decoder(trained.model, config.RMSNorm(), BlockCast(), torch.bfloat16)  # nothing is quantised
    reference.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert torch.equal(exact(TOKENS), reference(TOKENS))
        assert not torch.equal(ours(TOKENS), reference(TOKENS))


def test_a_norm_with_other_parameters_is_refused_when_the_evaluation_is_planned(run: RunFolder) -> None:
    """A trained bias is not dropped, and a missing bias is not made up."""
    plain, biased = describe(find(str(run.path), Path("runs"))), config.LayerNorm(bias=True)
    first = r"layers\.0\.attention\.wqkv\.norm\.bias, layers\.0\.feed_forward.* and 5 more; norm=as_trained fits it"
    with pytest.raises(ConfigError, match=rf"^norm: .*step_00000010 lacks weights that layernorm needs: {first}"):
        build(replace(plain, norm=biased), CPU)
    with torch.device("meta"):
        model = Decoder(plain.model, biased, BlockCast(), torch.bfloat16)
    trained = replace(plain, norm=biased, shapes={name: p.shape for name, p in model.named_parameters()})
    build(trained, CPU)
    with pytest.raises(ConfigError, match=rf"^norm: .*step_00000010 has weights that rmsnorm does not take: {first}"):
        build(replace(trained, norm=config.RMSNorm()), CPU)
    assert plain.shapes.keys() == {name for name, _ in build(plain, CPU).named_parameters()}


def test_hugging_faces_folder_is_a_checkpoint_too(run: RunFolder, tmp_path: Path) -> None:
    trained = describe(path := find(str(run.path), Path("runs")))
    exact = replace(
        trained, norm=config.RMSNorm(), precision=config.Precision(schedule=(config.PrecisionRow(plan={"*": "bf16"}),))
    )
    decoder = load(path, exact, CPU)
    export(decoder, config.RMSNorm(), trained.tokenizer, 64, tmp_path / "hf")
    there = describe(find(str(tmp_path / "hf"), Path("runs")))
    assert (there.name, there.max_length, there.model.hidden_size) == ("hf", 64, trained.model.hidden_size)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "hf", there, CPU)(TOKENS), decoder(TOKENS))


def test_what_is_missing_or_broken_is_named(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "run")))
    path = find(str(copy.path), Path("runs"))
    trained = describe(path)
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated or unreadable"):
        load(path, trained, CPU)
    with pytest.raises(CheckpointError, match="truncated or unreadable"):
        describe(path)
    copy.tokenizer_path.unlink()
    with pytest.raises(ConfigError, match=r"its tokenizer is missing: .*tokenizer\.json"):
        describe(path)

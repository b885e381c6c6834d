import json
import os
import resource
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from mxstudy.train import checked_reader, checksums, stream_writer
from mxstudy.train import checkpoint as module
from mxstudy.train.checkpoint import CheckpointError, Checkpoints, load_weights, state_tensors
from mxstudy.train.loop import train_step
from mxstudy.train.optimizer import materialize_state


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", "f" * 64, {"study": "pretrain"}, keep_last=2)


def trained(steps=2):
    run, _ = tiny.build()
    for step in range(steps):
        train_step(run, step)
    return run


def state(run):
    if not run.optimizer.state:
        materialize_state(run.optimizer)
    return state_tensors(run.model, run.optimizer)


def tensors(run):
    return {name: tensor.clone() for name, tensor in state(run).items()}


@pytest.mark.integration
def test_a_round_trip_restores_every_bit_and_training_goes_on_the_same(checkpoints):
    run, fresh = trained(), tiny.build(replace(tiny.CONFIG, seed=1))[0]
    saved = tensors(run)
    path = checkpoints.save(2, state(run))
    assert checkpoints.load(path, state(fresh)) == 2
    loaded = tensors(fresh)
    assert set(loaded) == set(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert train_step(fresh, 2).loss == train_step(run, 2).loss
    assert train_step(fresh, 3).loss == train_step(run, 3).loss


def test_the_files_are_those_of_torchs_own_writer(checkpoints, tmp_path):
    kept = torch.arange(6.0)
    values = {"weight": torch.randn(5, 7), "half": torch.randn(3, 4).bfloat16(), "step": torch.tensor(1.0)}
    values |= {"none": torch.zeros(0, 3), "part": kept[2:5], "other part": kept[1:2]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True)
    (theirs,) = tmp_path.glob("*.safetensors")
    (ours,) = checkpoints.save(1, values).glob("*.safetensors")
    assert (ours.name, *header_and_bytes(ours)) == (theirs.name, *header_and_bytes(theirs))
    assert ours.stat().st_mode == theirs.stat().st_mode


def test_a_write_that_the_system_refuses_leaves_the_checkpoint_before(checkpoints):
    values = {"weight": torch.randn(1000)}
    first = checkpoints.save(1, values)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes
    try:
        with pytest.raises(
            CheckpointError, match=r"could not be written \(OSError: .*File too large.*step_00000001 stays"
        ):
            checkpoints.save(2, values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*checkpoints.folder.iterdir()] == [first]


def header_and_bytes(path):
    """Return the header, whose metadata have any order, and the bytes of all tensors."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def test_config_and_fingerprint_are_inside(checkpoints):
    run = trained()
    about = json.loads((checkpoints.save(2, state(run)) / "checkpoint.json").read_text())
    ours = {"step": 2, "fingerprint": "f" * 64, "config": {"study": "pretrain"}}
    assert ours.items() <= about.items()
    assert about.keys() - ours.keys() == {"checksums", "checksum"}


def test_only_safetensors_and_json_are_written(checkpoints):
    run = trained()
    files = checkpoints.save(2, state(run)).iterdir()
    assert {file.suffix for file in files} == {".safetensors", ".json"}


def test_the_newest_are_kept(checkpoints):
    run = trained()
    for step in (2, 4, 10, 200):
        checkpoints.save(step, state(run))
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000010", "step_00000200"]
    assert checkpoints.latest().name == "step_00000200"


def test_a_users_copy_is_neither_a_checkpoint_nor_deleted(checkpoints):
    run = trained()
    path = checkpoints.save(4, state(run))
    copies = {path.with_name(f"{path.name}.bak"), path.with_name("step_last")}
    for copy in copies:
        shutil.copytree(path, copy)
    assert checkpoints.latest() == path
    for step in (6, 8):
        checkpoints.save(step, state(run))
    assert names(checkpoints) == sorted({"step_00000006", "step_00000008", *(copy.name for copy in copies)})


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_kill_while_an_old_one_is_dropped_leaves_no_half_of_it(checkpoints, monkeypatch):
    def delete_one_file(folder, ignore_errors=False):
        (folder / "checkpoint.json").unlink()
        raise KeyboardInterrupt

    for step in (1, 2):
        checkpoints.save(step, {"a": torch.ones(1)})
    with monkeypatch.context() as killed:
        killed.setattr(module.shutil, "rmtree", delete_one_file)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(3, {"a": torch.ones(1)})
    left = sorted(checkpoints.folder.glob("step_*"))
    assert [checkpoints.load(path, {"a": torch.zeros(1)}) for path in left] == [2, 3]
    checkpoints.save(4, {"a": torch.ones(1)})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000003", "step_00000004"]


def test_a_pinned_one_is_never_dropped_not_by_another_process_either(checkpoints):
    run = trained()
    checkpoints.save(2, state(run))
    assert checkpoints.pin_latest() == "step_00000002"
    assert checkpoints.pin_latest() == "step_00000002"
    for step in (4, 6):
        checkpoints.save(step, state(run))
    again = replace(checkpoints)
    for step in (8, 10):
        again.save(step, state(run))
    assert names(checkpoints) == ["step_00000002", "step_00000008", "step_00000010"]
    assert again.pin_latest() == "step_00000010"


def test_a_pinned_one_can_still_be_read(checkpoints):
    run, fresh = trained(), tiny.build(replace(tiny.CONFIG, seed=1))[0]
    path = checkpoints.save(2, state(run))
    checkpoints.pin_latest()
    assert checkpoints.load(path, state(fresh)) == 2
    assert all(torch.equal(tensor, tensors(run)[name]) for name, tensor in tensors(fresh).items())


def test_without_a_checkpoint_there_is_none_to_pin(checkpoints):
    assert checkpoints.pin_latest() is None
    assert not checkpoints.folder.exists()


def test_another_run_is_refused(checkpoints):
    run = trained()
    path = replace(checkpoints, fingerprint="a" * 64).save(2, state(run))
    with pytest.raises(CheckpointError, match="belongs to run aaaaaaaaaaaa, not ffffffffffff"):
        checkpoints.load(path, state(run))


@pytest.mark.integration
@pytest.mark.parametrize("size", [0, 4, 1000, 10**7])
def test_a_file_of_another_length_is_named(checkpoints, size, caplog):
    run = trained()
    path = checkpoints.save(2, state(run))
    (file,) = path.glob("*.safetensors")
    os.truncate(file, size)
    with pytest.raises(CheckpointError, match=rf"truncated or unreadable .*{file.name} is .* there is none before it"):
        checkpoints.load(path, state(run))
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]  # torch would log a traceback


def flip(path: Path, byte: int) -> None:
    """Flip the lowest bit of one byte."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1]))


@pytest.mark.integration
@pytest.mark.parametrize("optimizers", [False, True])
def test_a_flipped_bit_names_file_and_tensor_and_the_checkpoint_before_it(checkpoints, optimizers):
    run = trained()
    checkpoints.save(2, state(run))
    path = checkpoints.save(4, state(run))
    (file,) = path.glob("*.safetensors")
    pieces = [p for p in checksums.pieces_of(file) if p.tensor.startswith("optimizer." if optimizers else "model.")]
    piece = pieces[len(pieces) // 2]
    flip(file, (piece.start + piece.stop) // 2)
    why = rf"{file.name}: tensor {piece.tensor} has other bytes .* use the one before it, step_00000002"
    with pytest.raises(CheckpointError, match=why):
        checkpoints.load(path, state(run))
    if optimizers:
        assert load_weights(path, run.model) == 4  # it reads no tensor of the optimizer
    else:
        with pytest.raises(CheckpointError, match=why):
            load_weights(path, run.model)


def test_what_was_written_otherwise_than_it_was_in_memory_is_found(checkpoints, monkeypatch):
    """The checksum is that of the tensor, not of the file that a disk or a driver has made of it."""

    def write_wrongly(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        flip(path, path.stat().st_size - 1)

    monkeypatch.setattr(stream_writer, "save_file", write_wrongly)
    path = checkpoints.save(2, {"a": torch.arange(12.0)})
    with pytest.raises(CheckpointError, match="tensor a has other bytes"):
        checkpoints.load(path, {"a": torch.zeros(12)})


def test_a_changed_header_is_no_checkpoint(checkpoints):
    run = trained()
    path = checkpoints.save(2, state(run))
    (file,) = path.glob("*.safetensors")
    flip(file, file.read_bytes().index(b"model.") + len(b"model."))  # another name of the same length
    with pytest.raises(CheckpointError, match=r"the header has other bytes"):
        checkpoints.load(path, state(run))


@pytest.mark.parametrize("name", ["checksum", "chacksum"])
def test_a_changed_step_is_not_believed(checkpoints, name):
    """This holds even if the checksum itself is missing, and only those of the tensors show that there was one."""
    path = checkpoints.save(2, {"a": torch.ones(1)})
    about = json.loads((path / "checkpoint.json").read_text())
    about[name] = about.pop("checksum")
    (path / "checkpoint.json").write_text(json.dumps(about | {"step": 3}))
    with pytest.raises(CheckpointError, match=r"no readable checkpoint\.json \(it was changed after it was written"):
        checkpoints.load(path, {"a": torch.zeros(1)})


def test_a_checkpoint_from_before_there_were_checksums_is_read(checkpoints):
    run, fresh = trained(), tiny.build(replace(tiny.CONFIG, seed=1))[0]
    path = checkpoints.save(2, state(run))
    about = json.loads((path / "checkpoint.json").read_text())
    del about["checksum"], about["checksums"]
    (path / "checkpoint.json").write_text(json.dumps(about))
    assert checkpoints.load(path, state(fresh)) == 2


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[1]"])
def test_a_checkpoint_without_its_json_is_named(checkpoints, text):
    path = checkpoints.save(2, {"a": torch.ones(1)})
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"no readable checkpoint\.json"):
        checkpoints.load(path, {"a": torch.zeros(1)})


def test_tensors_that_share_memory_are_refused_with_the_reason(checkpoints):
    tied = torch.ones(2, 3)
    with pytest.raises(CheckpointError, match=r"could not be written \(RuntimeError: Some tensors share memory"):
        checkpoints.save(2, {"a": tied, "b": tied})


def test_a_failed_write_leaves_the_last_good_one_and_no_litter(checkpoints, monkeypatch):
    run = trained()
    good = checkpoints.save(2, state(run))
    monkeypatch.setattr(module, "_sync", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device\); .*step_00000002 stays"):
        checkpoints.save(4, state(run))
    assert list(checkpoints.folder.iterdir()) == [good]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_last_good_one(checkpoints, tmp_path):
    run = trained()
    checkpoints.folder.mkdir()
    size = sum(tensor.nbytes for tensor in tensors(run).values())
    if os.system(f"mount -t tmpfs -o size={int(1.5 * size)} tmpfs {checkpoints.folder}"):
        pytest.skip("cannot mount a small disk here")
    try:
        good = checkpoints.save(2, state(run))
        with pytest.raises(CheckpointError, match=r"No space left on device.*step_00000002 stays"):
            checkpoints.save(4, state(run))
        assert list(checkpoints.folder.iterdir()) == [good]
        assert checkpoints.load(good, state(run)) == 2
    finally:
        os.system(f"umount {checkpoints.folder}")


class OnGPU(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("at", ["cpu", "gpu"])
def test_a_tensor_of_several_chunks_is_read_and_compared_wherever_it_belongs(checkpoints, monkeypatch, at):
    monkeypatch.setattr(checked_reader, "CHUNK", 48)  # the last one is shorter
    path = checkpoints.save(2, {"a": torch.arange(100.0), "none": torch.empty(0, 3), "one": torch.tensor(2.0)})
    pieces = [p for file in path.glob("*.safetensors") for p in checksums.pieces_of(file) if p.tensor]
    assert len(pieces) == 3
    for piece in pieces:
        shape = {"a": (100,), "none": (0, 3), "one": ()}[piece.tensor]
        target = torch.zeros(shape)
        asked = target.as_subclass(OnGPU) if at == "gpu" else target
        assert checked_reader.read_into(asked, piece) == piece.checksum()
        assert target.tolist() == {"a": list(range(100)), "none": [], "one": 2.0}[piece.tensor]


@pytest.mark.parametrize("target", [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4).T])
def test_a_tensor_that_is_laid_out_otherwise_is_read_and_compared(checkpoints, target):
    values = torch.arange(12.0).reshape(4, 3)
    path = checkpoints.save(2, {"a": values})
    checkpoints.load(path, {"a": target})
    assert torch.equal(target.float(), values)
    (file,) = path.glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="tensor a has other bytes"):
        checkpoints.load(path, {"a": target})

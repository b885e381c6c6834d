from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_decoder import random_decoder

from mxstudy import config
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.evaluation.checkpoints import describe, find, load
from mxstudy.evaluation.export import departure, log_probs, main, sequences
from mxstudy.evaluation.hugging_face import export
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import BlockCast
from mxstudy.tracking.folder import RunFolder

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
TEXT = "A text that is longer than sixty-five bytes, so that it fills a sequence of sixty-four and one more."


@pytest.mark.slow
def test_an_mxnorm_model_goes_out_with_how_far_it_is_off(
    trained: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--checkpoint", str(trained.path), "--to", str(tmp_path / "hf")])
    said = capsys.readouterr().out
    assert "(mxnorm p=2, mxfp8, compute bf16)" in said
    path = find(str(trained.path), Path("runs"))
    (tmp_path / "text.txt").write_text(TEXT)
    tokens_BT = sequences(describe(path), tmp_path / "text.txt")
    assert tokens_BT.shape == (1, 65)
    found = departure(path, describe(path), tmp_path / "hf", "float32", tokens_BT, CPU)
    assert 1e-4 < found.largest < 1
    assert abs(found.native_loss - found.exported_loss) < 0.1


def test_an_rmsnorm_model_comes_back_as_it_was(tmp_path: Path) -> None:
    shape = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=257)
    model = Decoder(shape, config.RMSNorm(), BlockCast(), torch.float32)
    model.init_weights(0)
    export(model, config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "first")
    main(["--checkpoint", str(tmp_path / "first"), "--to", str(tmp_path / "second"), "--dtype", "float32"])
    assert (tmp_path / "first/model.safetensors").read_bytes() == (tmp_path / "second/model.safetensors").read_bytes()
    tokens = torch.tensor([list(TEXT.encode())])
    plain = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "fp32"}),))
    back = replace(describe(tmp_path / "second"), precision=plain, compute="fp32")
    assert torch.equal(log_probs(load(tmp_path / "second", back, CPU), tokens), log_probs(model, tokens))


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_transformers_is_what_an_export_is_compared_with(dtype: str, off: float, tmp_path: Path) -> None:
    """transformers computes the exported RMSNorm model in FP32 as we do.

    A model that it computes in another way is noticed.
    """
    shape = config.Decoder(
        hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=257, qkv_bias=True
    )
    export(random_decoder(shape, config.RMSNorm(), 0), config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "hf", dtype)
    plain = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "fp32"}),))
    trained = replace(describe(tmp_path / "hf"), precision=plain, compute="fp32")
    tokens = torch.tensor([list(TEXT.encode())[:65]])
    found = departure(tmp_path / "hf", trained, tmp_path / "hf", dtype, tokens, CPU)
    assert found.largest < off
    assert (found.largest > 1e-4) == (dtype == "bfloat16")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 10.0}))
    assert departure(tmp_path / "hf", trained, tmp_path / "hf", dtype, tokens, CPU).largest > 0.5


def test_what_cannot_be_exported_is_said(trained: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="'nowhere' is not a run's folder"):
        main(["--checkpoint", "nowhere", "--to", str(tmp_path / "hf"), "--runs-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="exists already"):
        main(["--checkpoint", str(trained.path), "--to", str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no", "--text: 2 tokens are fewer than one sequence of 65"),
        (b"\x00" * 100 + b"\xff", r"--text: .*bad\.txt is not UTF-8: .* at byte 100"),
    ],
)
def test_a_text_that_cannot_be_compared_leaves_no_folder(
    trained: RunFolder, content: bytes, says: str, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    with pytest.raises(SystemExit, match=says):
        main(["--checkpoint", str(trained.path), "--to", str(tmp_path / "hf"), "--text", str(bad)])
    assert not (tmp_path / "hf").exists()

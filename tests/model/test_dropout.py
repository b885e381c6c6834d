"""Dropout's masks follow the position, do not depend on how the batch is divided, and exist only in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mxstudy import config
from mxstudy.config.fingerprint import hashed
from mxstudy.model.decoder import Decoder
from mxstudy.model.dropout import Dropout, attend_dropped, dropouts_of, without_dropout
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.model.random_streams import move_to
from mxstudy.numerics.random_bits import Random
from mxstudy.reader import ConfigError

MODEL = config.Decoder(
    hidden_size=32, ffn_size=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64, dropout=0.25
)
TOKENS_BT = torch.arange(4 * 8).view(4, 8) * 7 % 64


def build(model: config.Decoder = MODEL, seed: int = 0, backend: str = "auto", row: str = "bf16") -> Decoder:
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),), backend=backend)
    decoder = Decoder(model, config.RMSNorm(), precision.settings, DTYPES["bf16"])
    decoder.init_weights(0)
    apply_precision(decoder, precision, 0, "bf16", torch.device("cpu"), (seed,))
    return decoder


def test_at_zero_the_model_and_its_hash_are_those_without_the_field() -> None:
    plain = replace(MODEL, dropout=0.0)
    assert dropouts_of(build(plain)) == {}
    assert "dropout" not in hashed(plain)
    assert hashed(MODEL)["dropout"] == 0.25
    assert {name.partition(".")[2] for name in dropouts_of(build()) if name.startswith("layers.1.")} == {
        "1.attention.dropout",
        "1.attention_dropout",
        "1.ffn_dropout",
    }


def test_a_mask_keeps_the_mean_and_drops_its_share() -> None:
    dropout = Dropout(0.25)
    dropout.random = Random(torch.tensor([3, 4]), torch.zeros(3, 2, dtype=torch.int64))
    y = dropout(torch.ones(4, 64, 128))
    assert y.unique().tolist() == [0.0, torch.tensor(1 / 0.75).item()]
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert (y[0] == 0).float().mean(0).std() > 0.02  # rows have different masks
    assert torch.equal(dropout(torch.ones(4, 64, 8, 16)), y.view(4, 64, 8, 16))


def test_masks_do_not_depend_on_the_division_of_the_batch_and_change_with_step_and_seed() -> None:
    model = build()
    move_to(model, 5, 0)
    whole = model(TOKENS_BT)
    parts = []
    for start in (0, 2):
        move_to(model, 5, start * 8)
        parts.append(model(TOKENS_BT[start : start + 2]))
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(parts[0], model(TOKENS_BT[:2]))  # these tokens in other rows
    move_to(model, 6, 0)
    assert not torch.equal(model(TOKENS_BT), whole)
    other = build(seed=1)
    move_to(other, 5, 0)
    assert not torch.equal(other(TOKENS_BT), whole)


def test_each_place_drops_by_a_mask_of_its_own() -> None:
    model = build()
    names = list(dropouts_of(model))
    assert len(names) == 1 + 3 * MODEL.num_layers
    losses = set()
    for kept in names:
        for name, dropout in dropouts_of(model).items():
            dropout.train(name == kept)
        losses.add(model(TOKENS_BT, TOKENS_BT.roll(-1, 1)).item())
    assert len(losses) == len(names)
    assert len({tuple(d.random.keys.tolist()) for d in dropouts_of(model).values() if d.random}) == len(names)


def test_nothing_is_dropped_in_evaluation() -> None:
    model, plain = build(), build(replace(MODEL, dropout=0.0), backend="reference")
    expected = plain(TOKENS_BT)
    with without_dropout(model):
        assert torch.equal(model(TOKENS_BT), expected)
    assert not torch.equal(model(TOKENS_BT), expected)
    assert torch.equal(model.eval()(TOKENS_BT), expected)
    with without_dropout(model):
        pass
    assert not any(dropout.training for dropout in dropouts_of(model).values())  # as before


def test_attention_without_a_dropped_weight_is_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    tree_BTT = torch.ones(2, 8, 8, dtype=torch.bool).tril()
    tree_BTT[:, 4:, 2] = False
    off = Dropout(0.5).eval()
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend_dropped(q, k, v, None, off), causal)
    masked = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=tree_BTT[:, None])
    torch.testing.assert_close(attend_dropped(q, k, v, tree_BTT, off), masked)


def test_fused_blocks_step_aside_or_refuse() -> None:
    assert [block.backend.name for block in build().layers] == ["reference"] * 2
    assert build().layers[0].backend.why == "model.dropout: its masks have no kernel"
    with pytest.raises(ConfigError, match=r"fused cannot run layers\.0: model\.dropout: its masks have no kernel"):
        build(backend="fused", row="mxfp8")


def test_a_model_that_was_given_no_seed_is_refused() -> None:
    model = Decoder(MODEL, config.RMSNorm(), config.BlockCast(), torch.bfloat16)
    model.init_weights(0)
    with pytest.raises(ConfigError, match=r"^model\.dropout: there is no seed; "):
        model(TOKENS_BT)
    for rate in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=r"^dropout: must lie in 0 \.\. 1, below 1, not "):
            replace(MODEL, dropout=rate)

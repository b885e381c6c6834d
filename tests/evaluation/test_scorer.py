"""Against one request at a time, without batches, padding or sharing."""

from __future__ import annotations

import random

import pytest
import torch

from mxstudy import config
from mxstudy.evaluation.scorer import Request, Scorer, batches
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import apply_precision, block_cast

MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=128)
NORMS = {"rmsnorm": config.RMSNorm(), "p1": config.MXNorm(p=1.0), "p2": config.MXNorm(p=2.0)}


def decoder(norm: config.Norm = NORMS["rmsnorm"], row: str = "fp32") -> Decoder:
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),))
    model = Decoder(MODEL, norm, block_cast(precision), torch.float32)
    model.init_weights(0)
    apply_precision(model, precision, 0, "fp32", torch.device("cpu"))
    return model


def requests(count: int = 40) -> list[Request]:
    draw = random.Random(0)
    words = [tuple(draw.randrange(128) for _ in range(draw.randrange(1, 30))) for _ in range(count)]
    mixed = [Request(word, tuple(draw.randrange(128) for _ in range(draw.randrange(1, 6)))) for word in words]
    letters = [Request(words[0], (letter,)) for letter in range(4)]  # one context, one token each
    return mixed + letters + mixed[:2]


def alone(model: Decoder, request: Request) -> tuple[float, bool]:
    tokens = torch.tensor([request.context + request.continuation])
    with torch.no_grad():
        log_probs = model(tokens[:, :-1]).double().log_softmax(-1)[0, -len(request.continuation) :]
    wanted = torch.tensor(request.continuation)
    nats = log_probs[torch.arange(len(wanted)), wanted].sum().item()
    return nats, bool((log_probs.argmax(-1) == wanted).all())


@pytest.mark.integration
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("row", ["fp32", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("tokens_per_batch", [1, 100, 10_000])
def test_each_request_has_the_log_likelihood_that_it_has_alone(norm: str, row: str, tokens_per_batch: int) -> None:
    model, asked = decoder(NORMS[norm], row), requests()
    scored = Scorer(model, 64, tokens_per_batch).score(asked)
    assert len(scored) == len(asked)
    for request, found in zip(asked, scored, strict=True):
        nats, is_greedy = alone(model, request)
        assert found.nats == pytest.approx(nats, abs=1e-4)
        assert found.is_greedy == is_greedy


def test_equal_inputs_share_a_forward() -> None:
    model, seen = decoder(), []
    model.watchers = (lambda name, module, x: seen.append(len(x)) if name == "norm" else None,)
    asked = requests()
    Scorer(model, 64, 10_000).score(asked)
    assert sum(seen) == len({(r.context + r.continuation)[:-1] for r in asked}) < len(asked)


def test_what_is_too_long_loses_its_beginning_and_is_counted() -> None:
    model = decoder()
    scorer = Scorer(model, 16, 1000)
    long, short = Request(tuple(range(40)), (7, 8)), Request((3,), (9,))
    found, _ = scorer.score([long, short])
    assert scorer.truncated == 1
    assert found.nats == pytest.approx(alone(model, Request(tuple(range(25, 40)), (7, 8)))[0], abs=1e-5)


def test_batches_keep_to_their_tokens() -> None:
    lengths = [50, 30, 30, 10, 10, 10, 1]
    found = list(batches([(0,) * length for length in lengths], 60))
    assert [[len(tokens) for tokens in batch] for batch in found] == [[50], [30, 30], [10, 10, 10, 1]]

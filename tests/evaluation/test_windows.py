"""Windows equal those made by hand, and a loop over tokens that knows nothing of requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from each import each

from mxstudy import config
from mxstudy.evaluation.scorer import Request, Scorer
from mxstudy.evaluation.windows import sliding_windows
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import apply_precision

EOS, WINDOW = 100, 16


def requests(tokens: range | np.ndarray, window: int, stride: int) -> list[Request]:
    return list(sliding_windows(np.array(tokens, np.uint32), EOS, window, stride))


@each(
    ("window", "stride", "expected"),
    [
        (4, 2, [((EOS,), (1, 2, 3, 4)), ((2, 3, 4), (5, 6)), ((4, 5, 6), (7,))]),
        (4, 1, [((EOS,), (1, 2, 3, 4)), ((1, 2, 3, 4), (5,)), ((2, 3, 4, 5), (6,)), ((3, 4, 5, 6), (7,))]),
        (3, 3, [((EOS,), (1, 2, 3)), ((3,), (4, 5, 6)), ((6,), (7,))]),
        (6, 3, [((EOS,), (1, 2, 3, 4, 5, 6)), ((3, 4, 5, 6), (7,))]),
        (1, 1, [((before,), (before % 100 + 1,)) for before in (EOS, 1, 2, 3, 4, 5, 6)]),
        (7, 2, [((EOS,), (1, 2, 3, 4, 5, 6, 7))]),
        (99, 50, [((EOS,), (1, 2, 3, 4, 5, 6, 7))]),
    ],
)
def test_seven_tokens_by_hand(window: int, stride: int, expected: list[tuple[tuple[int, ...], ...]]) -> None:
    assert requests(range(1, 8), window, stride) == [Request(*pair) for pair in expected]


def test_every_token_once_and_no_window_longer_than_it_may_be() -> None:
    for length in range(30):
        for window in range(1, 9):
            for stride in range(1, window + 1):
                found = requests(range(length), window, stride)
                assert [token for one in found for token in one.continuation] == list(range(length))
                assert all(len(one.context) + len(one.continuation) <= window + 1 for one in found)
                assert all(len(one.context) == window - stride + 1 for one in found[1:])


def decoder() -> Decoder:
    model = config.Decoder(hidden_size=32, ffn_size=64, num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=128)
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "fp32"}),))
    built = Decoder(model, config.RMSNorm(), precision.settings, torch.float32)
    built.init_weights(0)
    apply_precision(built, precision, 0, "fp32", torch.device("cpu"))
    return built


@torch.no_grad()
def nats_of_token(model: Decoder, whole: torch.Tensor, place: int, stride: int) -> float:
    """Return the nats of a token in the first window, one after the other, that predicts it."""
    start = next(start for start in range(0, len(whole), stride) if place <= start + WINDOW)
    log_probs_TV = model(whole[None, start : start + WINDOW])[0].double().log_softmax(-1)
    return log_probs_TV[place - start - 1, whole[place]].item()


@pytest.mark.integration
@each("stride", [1, 5, 8, 16])
def test_a_documents_loss_is_that_of_a_loop_over_its_tokens(stride: int) -> None:
    model = decoder()
    for length in (3, 16, 17, 53):
        tokens = np.random.default_rng(length).integers(0, 128, length)
        whole = torch.tensor([EOS, *tokens])
        expected = sum(nats_of_token(model, whole, place, stride) for place in range(1, length + 1))
        scored = Scorer(model, WINDOW, tokens_per_batch=100).score(requests(tokens, WINDOW, stride))
        assert sum(one.nats for one in scored) == pytest.approx(expected, abs=1e-4)


def test_a_document_that_fits_has_the_whole_context_at_any_stride() -> None:
    tokens = np.random.default_rng(0).integers(0, 128, WINDOW)
    assert requests(tokens, WINDOW, 1) == requests(tokens, WINDOW, 16) == requests(tokens, 10**6, 7)
    whole = torch.tensor([EOS, *tokens])
    model = decoder()
    with torch.no_grad():
        nats_TV = model(whole[None, :-1])[0].double().log_softmax(-1)
    expected = nats_TV.gather(1, whole[1:, None]).sum().item()
    (scored,) = Scorer(model, WINDOW, 100).score(requests(tokens, WINDOW, 8))
    assert scored.nats == pytest.approx(expected, abs=1e-4)

"""The scorer agrees with scoring one request at a time, without batches, padding or sharing."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from each import slow_but

from mxstudy import config
from mxstudy.evaluation import scorer as module
from mxstudy.evaluation.scorer import LONGEST_BRANCHES, BatchRow, Found, Request, Scored, Scorer, batches, pack, plan
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import apply_precision
from mxstudy.reader import ConfigError

MODEL = config.Decoder(  # with that init attention matters as much as the embedding
    hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=128, init="mitchell"
)
NORMS = {"rmsnorm": config.RMSNorm(), "p1": config.MXNorm(p=1.0), "p2": config.MXNorm(p=2.0)}
MAX_LENGTH = 64


def decoder(norm: str = "rmsnorm", row: str = "fp32") -> Decoder:
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),))
    model = Decoder(MODEL, NORMS[norm], precision.settings, torch.float32)
    model.init_weights(0)
    apply_precision(model, precision, 0, "fp32", torch.device("cpu"))
    return model


def questions(count: int = 12, unconditional: int = 80) -> list[Request]:
    """Return questions of four options each, letters among them.

    Some are equal, some differ at their end, and many follow one context.
    """
    draw = random.Random(0)

    def words(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(128) for _ in range(draw.randint(least, most)))

    contexts = [words(1, 30) for _ in range(count)]
    asked = [Request(context, words(1, 6)) for context in contexts for _ in range(4)]
    letters = [Request(words(9, 9), (letter,)) for letter in range(4)]
    nearly = [Request(contexts[0], (5, 6, 7, last)) for last in (1, 2, 1)]
    same = [Request((3, 4), words(1, 8)) for _ in range(unconditional)]
    return asked + letters + nearly + same + asked[:2]


def alone(model: Decoder, request: Request) -> Scored:
    tokens = torch.tensor([request.context + request.continuation])
    with torch.no_grad():
        log_probs = model(tokens[:, :-1]).double().log_softmax(-1)[0, -len(request.continuation) :]
    wanted = torch.tensor(request.continuation)
    nats = log_probs[torch.arange(len(wanted)), wanted].sum().item()
    return Scored(nats, bool((log_probs.argmax(-1) == wanted).all()))


@functools.cache
def expected(norm: str, row: str) -> list[Scored]:
    model = decoder(norm, row)
    return [alone(model, request) for request in questions()]


@pytest.mark.integration
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("row", "tokens_per_batch"),
    slow_but(
        [("mxfp8", 100)],
        [(row, tokens) for row in ("fp32", "mxfp8", "mxfp4") for tokens in (1, 100, 10_000)],
    ),
)
def test_each_request_has_the_log_likelihood_that_it_has_alone(norm: str, row: str, tokens_per_batch: int) -> None:
    found = Scorer(decoder(norm, row), MAX_LENGTH, tokens_per_batch).score(questions())
    off = [one for one, own in zip(found, expected(norm, row), strict=True) if not same(one, own)]
    assert len(off) <= (0 if row == "fp32" else 1)  # there are 137: a sum in another order may be cast to a neighbour


def same(one: Scored, other: Scored) -> bool:
    return abs(one.nats - other.nats) < 1e-4 and one.is_greedy == other.is_greedy


def test_what_is_greedy_is_so_to_its_last_token() -> None:
    model, tokens = decoder(), (3, 1, 4)
    with torch.no_grad():
        for _ in range(4):
            tokens += (int(model(torch.tensor([tokens]))[0, -1].argmax()),)
    context, likeliest = tokens[:3], tokens[3:]
    changed = (*likeliest[:-1], (likeliest[-1] + 1) % 128)
    found = Scorer(model, MAX_LENGTH, 100).score([Request(context, likeliest), Request(context, changed)])
    assert [one.is_greedy for one in found] == [True, False]


def test_a_context_and_equal_options_go_through_the_model_once() -> None:
    model, seen = decoder(), []
    model.watchers = (lambda name, module, x: seen.append(x.shape[:2]) if name == "norm" else None,)
    options = [(1, 2, 3), (1, 2, 4), (7,), (1, 2, 3), (8, 9)]
    Scorer(model, MAX_LENGTH, 1000).score([Request((0,) * 5, option) for option in options])
    assert seen == [(1, 5 + len((1, 2)) + len((8,)))]


def test_letters_need_the_context_alone_and_no_mask() -> None:
    (batch,) = plan([Request((1, 2, 3), (letter,)) for letter in range(4)], MAX_LENGTH, 1000).batches
    assert batch[0].length == 3
    assert pack(batch).tree(torch.device("cpu")) is None
    (batch,) = plan([Request((1, 2, 3), (letter, 5)) for letter in range(4)], MAX_LENGTH, 1000).batches
    assert pack(batch).tree(torch.device("cpu")) is not None


@pytest.mark.parametrize("context", [2, 2 * LONGEST_BRANCHES])
def test_many_options_of_one_context_are_spread_over_rows(context: int) -> None:
    asked = [Request((0,) * context, (option, 1, 2, 3, 4, 5)) for option in range(1000)]
    rows = [row for batch in plan(asked, 10_000, 1000).batches for row in batch]
    room = max(LONGEST_BRANCHES, context)
    assert len(rows) == math.ceil(1000 / (room // 5))
    assert max(row.length for row in rows) <= context + room
    places = [place for row in rows for branch in row.branches for place, _ in branch.lasts]
    assert sorted(places) == list(range(1000))


def test_what_is_too_long_loses_its_beginning_and_is_counted() -> None:
    model = decoder()
    scorer = Scorer(model, 16, 1000)
    long, longer, short = (
        Request(tuple(range(40)), (7, 8)),
        Request((1, 2), tuple(range(50, 90))),
        Request((3,), tuple(range(16))),
    )
    found = scorer.score([long, longer, short])
    left = [Request(tuple(range(25, 40)), (7, 8)), Request((73,), tuple(range(74, 90))), short]
    assert [one.nats for one in found] == pytest.approx([alone(model, request).nats for request in left], abs=1e-4)
    assert scorer.truncated == 2


def test_options_that_cut_the_context_differently_are_scored_apart() -> None:
    planned = plan([Request(tuple(range(40)), (7,) * length) for length in (1, 3, 3)], 16, 1000)
    assert planned.truncated == 3
    rows = [row for batch in planned.batches for row in batch]
    assert sorted((row.context[0], row.length) for row in rows) == [(24, 16), (26, 16)]


def test_no_position_is_beyond_what_the_model_reads() -> None:
    for batch in plan(questions(), 16, 100).batches:
        packed = pack(batch)
        assert packed.position_BT[packed.branch_BT >= 0].max() < 16


def test_batches_keep_to_their_tokens() -> None:
    lengths = [50, 30, 30, 10, 10, 10, 1]
    found = list(batches([BatchRow((0,) * length, []) for length in lengths], 60))
    assert [[row.length for row in batch] for batch in found] == [[50], [30, 30], [10, 10, 10, 1]]


def test_a_batch_that_is_large_enough_ends_where_rows_become_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_A_FORWARD", 60)
    lengths = [40, 20, 10, 10, 10, 10, 10, 10, 8, 7, 7]
    found = list(batches([BatchRow((0,) * length, []) for length in lengths], 1000))
    assert [[row.length for row in batch] for batch in found] == [[40, 20], [10] * 6 + [8], [7, 7]]


def test_a_batch_is_begun_before_the_scores_of_the_last_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Watched(Scorer):
        def begin(self, batch: Sequence[BatchRow]) -> Callable[[], Found]:
            done.append("begun")
            read = super().begin(batch)
            return lambda: [done.append("read"), read()][1]  # type: ignore[func-returns-value, return-value]

    scorer = Watched(decoder(), MAX_LENGTH, 12)
    assert len(scorer.score([Request((n,), (3,) * n) for n in (9, 8, 7)])) == 3
    assert done == ["begun", "begun", "read", "begun", "read", "read"]


def test_batches_are_planned_longest_first() -> None:
    planned = plan(questions(), MAX_LENGTH, 100).batches
    lengths = [row.length for batch in planned for row in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * batch[0].length <= 100 for batch in planned)


def test_padding_is_finite() -> None:
    model, seen = decoder(), []
    model.watchers = (lambda name, module, x: seen.append(x.isfinite().all()),)
    Scorer(model, MAX_LENGTH, 1000).score([Request((1,) * 9, (1, 2)), *(Request((3,), (4, 5, k)) for k in range(2))])
    assert all(seen)


def test_the_head_runs_on_few_positions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = decoder(), []
    whole = Scorer(model, MAX_LENGTH, 1000).score(questions())
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 7 * 128 + 5)
    model.output.register_forward_hook(lambda module, args, logits: seen.append(len(logits)))
    pieces = Scorer(model, MAX_LENGTH, 1000).score(questions())
    assert max(seen) == 7
    assert sum(seen) == sum(len(request.continuation) for request in questions())
    assert [one.nats for one in pieces] == pytest.approx([one.nats for one in whole], abs=1e-5)


def test_progress_is_told_after_each_batch() -> None:
    told: list[int] = []
    Scorer(decoder(), MAX_LENGTH, 100).score(questions(), told.append)
    planned = plan(questions(), MAX_LENGTH, 100).batches
    assert told == [sum(len(branch.lasts) for row in batch for branch in row.branches) for batch in planned]
    assert sum(told) == len(questions())


def test_a_nan_is_passed_on() -> None:
    model = decoder()
    with torch.no_grad():
        model.tok_embeddings.weight[5] = math.nan
    sick, well = Scorer(model, MAX_LENGTH, 1000).score([Request((1, 5), (2, 3)), Request((1, 4), (2, 3))])
    assert math.isnan(sick.nats)
    assert math.isfinite(well.nats)


def test_what_has_no_tokens_is_refused() -> None:
    for context, continuation in [((), (1,)), ((1,), ())]:
        with pytest.raises(ConfigError, match="context and continuation need at least one token each"):
            Request(context, continuation)


def test_nothing_is_asked() -> None:
    assert Scorer(decoder(), MAX_LENGTH, 100).score([]) == []

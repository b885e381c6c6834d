"""A model writes the same text with and without cached keys and values, draws as asked, and ends for a reason."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from each import each
from tiny import MODEL, MXNORM, RMSNORM

from mxstudy import config
from mxstudy.config import Texts
from mxstudy.config.casts import Cast, Gemms
from mxstudy.data.tokenizer import ByteTokenizer, Tokenizer
from mxstudy.evaluation.generation import Text, added_text, blocks, check_casts, chosen, continued, sampler_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.past import Past
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.reader import ConfigError

BYTES = replace(MODEL, num_layers=1, vocab_size=320)
MOE = replace(BYTES, mlp="moe", moe=config.MoE(num_experts=4, top_k=2))
GREEDY = Texts(temperature=0.0, max_new_tokens=12)
DRAWN = Texts(temperature=0.7, top_p=0.9, max_new_tokens=12, seed=3)
TOKENIZER = ByteTokenizer()


def plan(row: str) -> config.Precision:
    return config.Precision(schedule=(config.PrecisionRow(from_step=0, plan={"layers.*": row}),))


def model_in(norm: Any, row: str, compute: str, sizes: config.Decoder = BYTES) -> Decoder:
    """Return a decoder that does not repeat one byte, and attends to some tokens more than to others."""
    model = Decoder(sizes, norm, plan(row).settings, DTYPES[compute])
    model.init_weights(0)
    with torch.no_grad():
        model.tok_embeddings.weight *= 3
        model.output.weight *= 8
        for layer in model.layers:
            layer.attention.wqkv.weight *= 20
    apply_precision(model, plan(row), 0, compute, torch.device("cpu"), evaluates=True)
    return model


@each(
    ("norm", "row", "compute", "sizes"),
    [
        (RMSNORM, "fp32", "fp32", BYTES),
        (RMSNORM, "bf16", "bf16", BYTES),
        (MXNORM, "mxfp8", "bf16", BYTES),
        (MXNORM, "mxfp4", "fp32", BYTES),
        (MXNORM, "mxfp8", "bf16", MOE),
        (RMSNORM, "mxfp8", "bf16", replace(BYTES, qk_norm=True, qkv_bias=True)),
    ],
)
def test_a_token_read_alone_is_followed_by_what_it_is_followed_by_in_its_text(
    norm: Any, row: str, compute: str, sizes: config.Decoder
) -> None:
    """Fused blocks in bf16 and the reference in FP32 both know a token's position and what comes before it."""
    model = model_in(norm, row, compute, sizes)
    kept = continued(model, TOKENIZER, "def f(", GREEDY, 64)
    assert kept == continued(model, TOKENIZER, "def f(", GREEDY, 64, keeps=False)
    assert len(set(kept[0].text)) > 1


def test_what_is_kept_gives_the_features_of_the_whole_text() -> None:
    model = model_in(MXNORM, "mxfp8", "fp32")
    tokens = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(0))
    pasts = [Past(20) for _ in model.layers]
    with torch.no_grad():
        parts = [model.features(part, pasts=pasts) for part in tokens.split([5, *[1] * 15], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model.features(tokens), rtol=1e-5, atol=1e-5)
    assert {past.length for past in pasts} == {20}


def test_texts_side_by_side_have_draws_of_their_own_which_others_do_not_change() -> None:
    model = model_in(RMSNORM, "bf16", "bf16")
    three = continued(model, TOKENIZER, "ab", DRAWN, 64, samples=3)
    assert len({text.text for text in three}) == 3
    assert continued(model, TOKENIZER, "ab", DRAWN, 64, samples=2) == three[:2]
    assert continued(model, TOKENIZER, "ab", replace(DRAWN, seed=4), 64) != three[:1]


LIKELY = (0.5, 0.3, 0.15, 0.05)


@each(
    ("settings", "uniform", "token"),
    [
        (Texts(temperature=0.0), 0.999, 2),
        (Texts(), 0.0, 2),
        (Texts(), 0.49, 2),
        (Texts(), 0.51, 0),
        (Texts(), 0.81, 3),
        (Texts(), 0.999999, 1),
        (Texts(top_p=0.5), 0.999, 2),  # the first token has it alone
        (Texts(top_p=0.51), 0.999, 0),
        (Texts(top_p=0.8), 0.62, 2),  # 0.62 * 0.8 < 0.5
        (Texts(top_p=1e-9), 0.999, 2),
        (Texts(temperature=1e-3), 0.999, 2),
        (Texts(temperature=1e-320), 0.999, 2),
        (Texts(temperature=1e6), 0.76, 1),  # all equally likely, in their order
    ],
)
def test_a_token_is_drawn_from_the_likeliest(settings: Texts, uniform: float, token: int) -> None:
    logits = torch.tensor([LIKELY], dtype=torch.float64).log()[:, [1, 3, 0, 2]]
    assert chosen(logits, settings, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


class Says(torch.nn.Module):
    """A head that gives the logits of one token after the other."""

    def __init__(self, *tokens: int, value: float = 9.0) -> None:
        super().__init__()
        self.left, self.value = list(tokens), value

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(features), 320)
        logits[:, self.left.pop(0)] = self.value
        logits[:, 300] = 10.0  # an id that no token has
        return logits


def test_a_text_says_why_it_ends() -> None:
    model, two = model_in(RMSNORM, "fp32", "fp32"), replace(GREEDY, max_new_tokens=2)
    prompt, found = "ab", []
    for says, settings, length in (
        (Says(104, 105), two, 64),
        (Says(104, 256), two, 64),
        (Says(104, 105), GREEDY, 4),  # EOS, a, b and h are read
        (Says(104, 105, value=math.nan), two, 64),
    ):
        model.output = says  # type: ignore[assignment]
        found += continued(model, TOKENIZER, prompt, settings, length)
    assert found == [
        Text("ab", "hi", 2, "max_new_tokens"),
        Text("ab", "h", 1, "eos"),
        Text("ab", "hi", 2, "context"),
        Text("ab", "", 0, "nan"),
    ]
    assert blocks(found)[1] == "--- 1 token, then the model ended the text\nabh"
    assert blocks(found)[2] == "--- 2 tokens, then the text was as long as the training's sequences\nabhi"
    assert blocks([Text("a\n", "\x1b[2J\t\x07é", 5, "eos")])[0].endswith("\na\n\\x1b[2J\t\\x07é")


def test_a_space_before_the_first_new_word_is_kept() -> None:
    """A decoder like Llama 2's drops a space at the beginning of a document."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"\u2581to": 0, "\u2581be": 1, "</s>": 2}, unk_token="</s>")
    )
    words.pre_tokenizer, words.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    words.add_special_tokens(["</s>"])
    by_words = Tokenizer(words, "</s>")
    assert [added_text(by_words, prompt, [1]) for prompt in ([0], [])] == [" be", "be"]
    assert added_text(TOKENIZER, [*"é".encode()], [0xA9, 0x61]) == "\ufffda"


def test_a_prompt_that_is_not_unicode_is_refused() -> None:
    model, message = model_in(RMSNORM, "fp32", "fp32"), r"'a\udcff' is not valid Unicode; give it in UTF-8"
    with pytest.raises(ConfigError, match="^prompt: " + re.escape(message)):
        continued(model, TOKENIZER, "a\udcff", GREEDY, 64)
    with pytest.raises(ConfigError, match=r"^sample\.prompts\[0\]: " + re.escape(message)):
        sampler_of(config.TextsDuringTraining(prompts=("a\udcff",)), model, TOKENIZER, 64)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    model = model_in(RMSNORM, "fp32", "fp32")
    assert continued(model, TOKENIZER, "x" * 63, GREEDY, 64)[0].tokens == 1
    with pytest.raises(ConfigError, match=r"^prompt: 64 tokens and the EOS before them are more than the 64 of"):
        continued(model, TOKENIZER, "x" * 64, GREEDY, 64)
    settings = config.TextsDuringTraining(prompts=("a", "x" * 64))
    with pytest.raises(ConfigError, match=r"^sample\.prompts\[1\]: 64 tokens"):
        sampler_of(settings, model, TOKENIZER, 64)


def test_square_blocks_of_activations_are_refused() -> None:
    square = Cast(format="E4M3", two_dimensional=True)
    recipes = {"own": Gemms(forward_x=square, forward_w=square)}
    asked = replace(plan("own"), recipes=recipes)
    with pytest.raises(ConfigError, match=r"^precision\.schedule: own casts activations in square blocks, of several"):
        check_casts(asked, asked.schedule)
    weights = replace(asked, recipes={"own": Gemms(forward_x=Cast(format="E4M3"), forward_w=square)})
    check_casts(weights, weights.schedule)


@each(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature: must not be negative, not -0.1; 0 is greedy"),
        ({"top_p": 0.0}, "top_p: must lie above 0 and be at most 1, not 0; 1 keeps all tokens"),
        ({"top_p": 1.1}, "top_p: must lie above 0 and be at most 1, not 1.1; 1 keeps all tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be positive, not 0"),
        ({"temperature": 0.0, "top_p": 0.5}, "top_p: nothing is drawn with temperature=0; leave top_p at 1, or"),
        ({"temperature": 0.0, "seed": 1}, "seed: nothing is drawn with temperature=0; leave seed at 0, or"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Texts(**values)
    assert str(caught.value).startswith(message)

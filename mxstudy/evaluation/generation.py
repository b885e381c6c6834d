"""Continue prompts with a decoder, token by token, with the keys and values that attention keeps of earlier tokens.

A prompt begins a document: EOS stands before it, as between the documents of a training. Logits are made probabilities
in FP64 on the CPU, and the draws of a text depend on its seed and number alone. Without kept keys and values (`keeps`
false) the model reads the whole text again for each token. The casts are the same, because a forward casts every token
on its own, in blocks along its features: only wgrad has blocks along tokens. Square blocks of activations would be an
exception, and are refused. Only the order of attention's sums differs, and so the last bit of some numbers, which a
coarse format may round to neighbours on its grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config import Texts, TextsDuringTraining
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation.beside_training import beside_training
from mxstudy.model.decoder import Decoder
from mxstudy.model.past import Past
from mxstudy.model.seeds import generator_for
from mxstudy.reader import require

# Why a text has no more tokens, in words.
ENDS = {
    "eos": "then the model ended the text",
    "max_new_tokens": "as many as asked",
    "context": "then the text was as long as the training's sequences",
    "nan": "then its logits were not finite",
}


class Text(NamedTuple):
    """What a model wrote after a prompt: `tokens` new ones, the EOS not counted. `ended`: a row of ENDS."""

    prompt: str
    text: str
    tokens: int
    ended: str


def check_prompt(prompt: str, tokenizer: Tokenizer, max_length: int, key: str) -> list[int]:
    """Return EOS and the prompt as ids. Raises ConfigError, naming the config `key`, if no token fits behind them.

    Raises ConfigError, too, for bytes of a command line that are not UTF-8.
    """
    require(is_unicode(prompt), f"{key}: {prompt!r} is not valid Unicode; give it in UTF-8")
    ids = [tokenizer.eos_id, *tokenizer.encode_batch([prompt])[0].tolist()]
    require(
        len(ids) <= max_length,
        f"{key}: {len(ids) - 1:,} tokens and the EOS before them are more than the {max_length:,} of the training's "
        "sequences; shorten it",
    )
    return ids


def is_unicode(text: str) -> bool:
    """Return whether a text has a UTF-8 form.

    Half of a surrogate pair, which Python makes of a byte that is not UTF-8, has none.
    """
    return not any("\ud800" <= one <= "\udfff" for one in text)


def check_prompts_of(settings: TextsDuringTraining, tokenizer: Tokenizer, max_length: int) -> None:
    """Raise ConfigError for a prompt of a training's texts behind which no token fits."""
    for number, prompt in enumerate(settings.prompts):
        check_prompt(prompt, tokenizer, max_length, f"sample.prompts[{number}]")


def check_casts(precision: config.Precision, rows: Sequence[config.PrecisionRow]) -> None:
    """Raise ConfigError if a recipe of these rows casts the forward's activations in blocks of several tokens.

    Each further token would change the tokens in such a block, and so its scale.
    """
    for name in dict.fromkeys(name for row in rows for name in row.plan.values()):
        cast = precision.filled(name).forward_x
        require(
            cast is None or not cast.two_dimensional,
            f"precision.schedule: {name} casts activations in square blocks, of several tokens, and a text grows by "
            "one; take a recipe whose forward_x has blocks along features",
        )


@torch.inference_mode()
def continued(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    settings: Texts,
    max_length: int,
    samples: int = 1,
    keeps: bool = True,
) -> list[Text]:
    """Return `samples` continuations of a prompt, written side by side."""
    ids, device = check_prompt(prompt, tokenizer, max_length, "prompt"), model.tok_embeddings.weight.device
    room = max_length + 1 - len(ids)  # the last token is not read
    most = min(settings.max_new_tokens, room)
    written: list[list[int]] = [[] for _ in range(samples)]
    ends: dict[int, str] = {}
    draws = [generator_for(settings.seed, f"sample {number}") for number in range(samples)]
    pasts = [Past(len(ids) + most) for _ in model.layers] if keeps else None
    unread_BT = whole_BT = torch.tensor([ids] * samples, device=device)
    for _ in range(most):
        features_BTD = model.features(unread_BT, pasts=pasts)
        logits_BV = model.output(features_BTD[:, -1])[:, : tokenizer.vocab_size].double().cpu()
        uniform_B = torch.cat([torch.rand(1, generator=draw, dtype=torch.float64) for draw in draws])
        next_B = chosen(logits_BV, settings, uniform_B)
        for number in {*range(samples)} - ends.keys():
            if not logits_BV[number].isfinite().all():
                ends[number] = "nan"
            elif next_B[number] == tokenizer.eos_id:
                ends[number] = "eos"
            else:
                written[number].append(int(next_B[number]))
        if len(ends) == samples:
            break
        whole_BT = torch.cat((whole_BT, next_B[:, None].to(device)), dim=1)
        unread_BT = whole_BT[:, -1:] if keeps else whole_BT
    last = "max_new_tokens" if most == settings.max_new_tokens else "context"
    return [
        Text(prompt, added_text(tokenizer, ids[1:], own), len(own), ends.get(number, last))
        for number, own in enumerate(written)
    ]


def added_text(tokenizer: Tokenizer, prompt: list[int], own: list[int]) -> str:
    """Return the text that the tokens `own` add to the prompt's.

    They are decoded together, because some decoders drop the space at the beginning of a text.
    """
    before, whole = (tokenizer.backend.decode(ids, skip_special_tokens=False) for ids in (prompt, prompt + own))
    return whole[len(before) :]


def chosen(logits_BV: Tensor, settings: Texts, uniform_B: Tensor) -> Tensor:
    """Return the next tokens, int64 [B]: the likeliest ones, or those that uniform numbers in [0, 1) draw."""
    if settings.temperature == 0:
        return logits_BV.argmax(-1)
    below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # may be divided by any temperature above 0
    likely_BV, tokens_BV = (below_BV / settings.temperature).softmax(-1).sort(descending=True, stable=True)
    upto_BV = likely_BV.cumsum(-1)
    kept_B1 = (upto_BV - likely_BV < settings.top_p).sum(-1, keepdim=True).clamp(min=1)
    drawn_B1 = uniform_B[:, None] * upto_BV.gather(-1, kept_B1 - 1)
    place_B1 = torch.searchsorted(upto_BV, drawn_B1, right=True).minimum(kept_B1 - 1)
    return tokens_BV.gather(-1, place_B1).squeeze(-1)


def sampler_of(
    settings: TextsDuringTraining, model: Decoder, tokenizer: Tokenizer, max_length: int
) -> Callable[[], list[Text]]:
    """Return a function that continues each prompt once with the model in its current state, and changes nothing.

    As an evaluation during training, it is eager, and computes as the model's checkpoint would.
    """
    check_prompts_of(settings, tokenizer, max_length)

    def write() -> list[Text]:
        with beside_training(model):
            return [
                text
                for prompt in settings.prompts
                for text in continued(model, tokenizer, prompt, settings, max_length)
            ]

    return write


def printable(text: str) -> str:
    """Return a text for a terminal, with control characters, which a model may write, in Python's notation."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


def blocks(texts: Iterable[Text]) -> list[str]:
    """Return each text for reading: above it its length and end, then its prompt and what the model wrote."""
    return [
        f"--- {one.tokens} token{'s' * (one.tokens != 1)}, {ENDS[one.ended]}\n{printable(one.prompt + one.text)}"
        for one in texts
    ]

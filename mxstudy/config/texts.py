"""The schema of texts that a language model writes: how tokens are drawn, and when it writes during training."""

from __future__ import annotations

from mxstudy.reader import require, schema


@schema
class Texts:
    """The way a prompt is continued: token by token, until the model ends the document.

    `temperature`: the logits are divided by it; 0 takes the likeliest token. `top_p`: draw only from the likeliest
    tokens: the fewest that together have this probability. `max_new_tokens`: tokens after the prompt, fewer if the
    sequence length of the training ends before.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0  # draws the tokens

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature: must not be negative, not {self.temperature:g}; 0 is greedy")
        require(
            0 < self.top_p <= 1, f"top_p: must lie above 0 and be at most 1, not {self.top_p:g}; 1 keeps all tokens"
        )
        require(self.max_new_tokens > 0, f"max_new_tokens: must be positive, not {self.max_new_tokens}")
        require(0 <= self.seed < 2**64, f"seed: must lie in 0 .. 2**64 - 1, not {self.seed}")
        for name in ("top_p", "seed") if self.temperature == 0 else ():
            unset = getattr(Texts, name)
            require(
                getattr(self, name) == unset,
                f"{name}: nothing is drawn with temperature=0; leave {name} at {unset:g}, or set a temperature",
            )


@schema
class TextsDuringTraining(Texts):
    """Texts written every `every_steps` steps and after the last; 0: never. The training's numbers do not change.

    `prompts`: the beginnings of the texts, each continued once; "" is the beginning of a document.
    """

    every_steps: int = 0
    prompts: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every_steps >= 0, f"every_steps: must not be negative, not {self.every_steps}; 0 is never")
        require(bool(self.prompts), 'prompts: must have one or more; [""] begins a document')

"""Give a norm the blocks of the cast that reads it, and refuse casts that the norm cannot use.

MXNorm estimates the RMS from the absmax that the cast of its output computes anyway, so it uses the blocks of that
cast: 16 for NVFP4, 32 for MX, 128 for DeepSeek's FP8. The format of the scales does not matter, because the absmax is
taken before they are rounded. If X is not cast, or has one scale per tensor, MXNorm takes the absmax of blocks of its
own, as a control. If the forward transforms X, the cast has the absmax of transformed blocks: the transform is
orthonormal within a row, keeps the row's RMS, and so these estimate the same RMS. MXNorm folds the gain, so the cast's
absmax does not contain it.
"""

from __future__ import annotations

from mxstudy.config.casts import BlockCast, Cast
from mxstudy.config.settings import reads_of_gain
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.moe import SharedUp
from mxstudy.model.norm import MXNorm, Norm, PostRoundMXNorm
from mxstudy.numerics.norm_linear import check_source
from mxstudy.reader import ConfigError, require


def take_cast(name: str, linear: NormLinear | SharedUp, settings: BlockCast) -> None:
    """Make the linear's norm take its blocks from the linear's casts. Raises ConfigError if it cannot use them.

    `settings`: the run's settings, used if no cast reads the norm's output.
    """
    norm = norm_read(linear)
    if isinstance(norm, MXNorm):
        take_blocks(name, norm, linear, settings)
    try:
        check_source(linear.gemms, norm.fold_gain and not norm.fold_gain_in_dgrad)
    except ConfigError as error:
        raise ConfigError(f"precision.schedule: plan for {name}: {error}") from None
    require(
        not norm.fold_gain_in_dgrad or not (linear.is_of_experts or isinstance(linear, SharedUp)),
        f"norm.fold_gain_in_dgrad: {name} reads a norm together with others, which return the gradient of its output "
        "times the gain; set it to false, or take another model.mlp than moe",
    )
    if isinstance(norm, PostRoundMXNorm):
        check_scales_read(name, norm, linear.gemms.forward_x)
        if isinstance(linear, NormLinear):
            norm.transform = linear.gemms.forward_transform


def norm_read(linear: NormLinear | SharedUp) -> Norm:
    return linear.norm if isinstance(linear, NormLinear) else linear.reads[0]


def settings_read(linear: MXLinear) -> tuple[str, ...]:
    """Return the settings of `precision` that the linear's norm and its gain use.

    MXNorm itself uses none if it has the cast's blocks.
    """
    if not isinstance(linear, NormLinear):
        return ()
    norm, rounding = linear.norm, linear.norm.rounding
    own = () if isinstance(norm, MXNorm) and has_blocks(linear.gemms.forward_x) else norm.reads
    return (*own, *reads_of_gain(rounding.precision if rounding else linear.gain))


def has_blocks(cast: Cast | None) -> bool:
    return cast is not None and cast.scale != "none"


def has_own_blocks(linear: MXLinear) -> bool:
    """Return whether the linear's norm takes the absmax of blocks that belong to no cast."""
    return isinstance(linear, NormLinear) and isinstance(linear.norm, MXNorm) and not has_blocks(linear.gemms.forward_x)


def take_blocks(name: str, norm: MXNorm, linear: MXLinear, settings: BlockCast) -> None:
    cast, transform = linear.gemms.forward_x, linear.gemms.forward_transform
    reason = cast and why_no_absmax(cast)
    require(
        not reason,
        f"norm: MXNorm takes the absmax of blocks within a token's row, but {name} casts its output {reason}",
    )
    block_size = (cast.block_size or 0) if cast and has_blocks(cast) else settings.block_size
    if isinstance(linear, NormLinear):
        norm.take_blocks(block_size, transform)
        return
    draws_own_signs = transform is not None and transform.is_random
    require(
        (norm.block_size, norm.transform) == (block_size, transform) and not draws_own_signs,
        f"norm: MXNorm takes the absmax of one cast, and {name} reads the experts' norm but casts it in other blocks "
        "or under another transform; give both the same forward_x and forward_transform, without random signs",
    )


def why_no_absmax(cast: Cast) -> str | None:
    """Return why a cast of the norm's output has no absmax of blocks within a row, and a remedy, or None if it has."""
    if cast.two_dimensional:
        return "in blocks that span several tokens; use rmsnorm, or set forward_x.two_dimensional=false"
    if cast.statistic != "absmax":
        return "by the deviation of blocks, whose sums of squares give the exact RMS as cheaply; use rmsnorm"
    return None


def check_scales_read(name: str, norm: PostRoundMXNorm, cast: Cast | None) -> None:
    """Raise ConfigError unless the norm's output is cast with the scales from which the norm estimates its RMS."""
    if cast is None:
        return
    require(
        cast.scale != "none",
        f"norm: PostRoundMXNorm reads block scales, but {name} casts the norm's output with one scale per tensor; "
        "use rmsnorm, or a recipe with block scales",
    )
    if cast.scale != "E8M0":
        raise ConfigError(
            f"norm: PostRoundMXNorm reads E8M0 scales, but {name} casts the norm's output to {cast.format} with "
            f"{cast.scale} scales; use rmsnorm, or a recipe with E8M0 scales"
        )
    reads = norm.fmt
    require(
        cast.format == reads,
        f"norm.format: {reads}, but {name} casts the norm's output to {cast.format}; make them equal",
    )
    own, theirs = ((c.block_size, c.scale_rule) for c in (norm.block_cast, cast))
    is_simple = not cast.two_dimensional and cast.statistic == "absmax" and len(cast.candidates) == 1
    require(
        own == theirs and is_simple,
        f"norm: PostRoundMXNorm reads the scales of 1 x {own[0]} blocks by {own[1]}, but {name} casts its output to "
        "others; use mxnorm_p2",
    )

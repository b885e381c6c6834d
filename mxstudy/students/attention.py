"""Self-attention before each MLP of the student, over sequences of its samples (instability paper, appendix D).

    z_k = A_k + SelfAttn(LN1(A_k))        A_{k+1} = z_k + W2 phi(W1 LN2(z_k)) + b        (Eq. 11)

The paper specifies three things: no mask, a norm before the attention, and inputs (B, S, d). It leaves the rest open
and published no code. Our interpretation: samples are independent Gaussians, as without attention, and every L
consecutive samples are a sequence, without positions. Q and K have no norm, scores are divided by the square root of
the head size, and there are no biases, as W1 has none. Q, K, V and the output projection are initialised as D x D
linears and quantised as the MLP's linears; Q, K, V are one GEMM after one norm. The products between tokens are not
quantised, as in the paper's language models: they are GEMMs of the compute dtype, and the softmax between them is a
vector operation.

Shapes: L tokens per sequence, N heads of size H, N H = D; T, D and a stack's [S] as in `mxstudy.students.model`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxstudy.config.casts import Gemms
from mxstudy.model.linear import MXLinear
from mxstudy.numerics.gemms import Linear, mx_linear

Product = Callable[[Tensor, Tensor], Tensor]  # a [..., M, K], b [..., N, K] -> a b^T [..., M, N]


class SelfAttention(nn.Module):
    """Map x [..., T, D] to SelfAttn(LN1(x)) [..., T, D]; `qkv` is D -> 3 D, fused with LN1 if there is a norm."""

    def __init__(self, qkv: MXLinear, out: MXLinear, heads: int, sequence_length: int) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.heads, self.sequence_length = heads, sequence_length

    def forward(self, x_TD: Tensor, softmax_dtype: torch.dtype) -> Tensor:
        def product(a: Tensor, b: Tensor) -> Tensor:  # stacks of one matrix per sequence and head
            return mx_linear(a, b, Linear(Gemms()), self.qkv.compute)

        return self.out(self.attend(self.qkv(x_TD), product, softmax_dtype))

    def attend(self, qkv_TP: Tensor, product: Product, softmax_dtype: torch.dtype) -> Tensor:
        """Return softmax(Q K^T / sqrt(H)) V within each sequence and head: [..., T, D] from `qkv_TP` [..., T, 3 D].

        `softmax_dtype`: the dtype to which the softmax's argument and result are rounded.
        """
        qkv_BL3NH = qkv_TP.unflatten(-1, (3, self.heads, -1)).unflatten(-4, (-1, self.sequence_length))
        q, k, v = (y_BLNH.transpose(-3, -2) for y_BLNH in qkv_BL3NH.unbind(-3))
        scores_BNLL = product(q, k).to(softmax_dtype) * q.shape[-1] ** -0.5
        mixed_BNLH = product(torch.softmax(scores_BNLL, -1), v.mT)
        return mixed_BNLH.transpose(-3, -2).flatten(-2).flatten(-3, -2)

"""Self-attention before each MLP of the student, whose samples are read as sequences (instability paper, appendix D).

    z_k = A_k + SelfAttn(LN1(A_k))        A_{k+1} = z_k + W2 phi(W1 LN2(z_k)) + b        (Eq. 11)

The paper says: no mask, a norm before it, inputs (B, S, d). It leaves the rest open, and no code of it is public; read
here is: samples are as without attention, independent Gaussians, and every L that follow each other are a sequence,
without positions. No norm of Q and K, scores over the root of the head size, and no biases, as W1 has none. Q, K, V and
the output projection are initialised as D x D linears and quantised as the MLP's; Q, K, V are one GEMM behind one norm.
The products between tokens are not quantised, as in the paper's language models: they are GEMMs of the compute dtype,
and the softmax between them is a vector operation.

Shapes: L tokens a sequence, N heads of size H, N H = D; T, D and a stack's [S] as in `mxstudy.students.model`.
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
    """x [..., T, D] -> SelfAttn(LN1(x)) [..., T, D]; `qkv`: D -> 3 D, fused with LN1 where there is a norm."""

    def __init__(self, qkv: MXLinear, out: MXLinear, heads: int, sequence_length: int) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.heads, self.sequence_length = heads, sequence_length

    def forward(self, x_TD: Tensor, softmax_dtype: torch.dtype) -> Tensor:
        def product(a: Tensor, b: Tensor) -> Tensor:  # of stacks of matrices, one a sequence and head
            return mx_linear(a, b, Linear(Gemms()), self.qkv.compute)

        return self.out(self.attend(self.qkv(x_TD), product, softmax_dtype))

    def attend(self, qkv_TP: Tensor, product: Product, softmax_dtype: torch.dtype) -> Tensor:
        """softmax(Q K^T / sqrt(H)) V within each sequence and head: [..., T, 3 D] -> [..., T, D].

        `softmax_dtype`: what its argument and its result are rounded to.
        """
        qkv_BL3NH = qkv_TP.unflatten(-1, (3, self.heads, -1)).unflatten(-4, (-1, self.sequence_length))
        q, k, v = (y_BLNH.transpose(-3, -2) for y_BLNH in qkv_BL3NH.unbind(-3))
        scores_BNLL = product(q, k).to(softmax_dtype) * q.shape[-1] ** -0.5
        mixed_BNLH = product(torch.softmax(scores_BNLL, -1), v.mT)
        return mixed_BNLH.transpose(-3, -2).flatten(-2).flatten(-3, -2)

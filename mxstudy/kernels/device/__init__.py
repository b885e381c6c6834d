"""Triton kernels. Only the launch of a kernel imports them, because only GPU builds of torch include Triton."""

"""Triton: what runs on the GPU. Imported by the first launch of a kernel, for only GPU builds of torch bring Triton."""

"""The approximation study: how well MXNorm approximates RMSNorm, measured on random tensors."""

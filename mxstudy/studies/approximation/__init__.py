"""What MXNorm approximates, measured on random tensors."""

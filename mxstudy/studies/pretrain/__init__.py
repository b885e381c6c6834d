"""Pre-training of a decoder."""

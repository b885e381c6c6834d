"""The pre-training study: train a decoder on a corpus."""

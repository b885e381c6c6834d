"""The perplexity study: loss of a checkpoint on a corpus."""

"""Loss of a checkpoint on a corpus."""

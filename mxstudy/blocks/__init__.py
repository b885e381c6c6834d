"""Fused blocks: between two GEMMs every tensor is read once, and cast there for all that read it next."""

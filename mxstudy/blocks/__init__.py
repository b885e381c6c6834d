"""Fused blocks: between two GEMMs they read every tensor once, and cast it in the same pass for its next GEMMs."""

"""Fused blocks: between two GEMMs they read every tensor once, and cast it there for every GEMM that reads it next."""

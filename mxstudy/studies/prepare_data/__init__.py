"""Preparing a corpus."""

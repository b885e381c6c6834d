"""Interventions: a run of students once more from just before it diverges, with something changed."""

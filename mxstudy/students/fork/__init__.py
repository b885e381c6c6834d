"""Interventions: repeat a student-teacher run from shortly before its divergence with something changed."""

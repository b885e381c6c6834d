"""What a run records: its folder, the journal in it (the authoritative record), and the journal's mirror in MLflow."""

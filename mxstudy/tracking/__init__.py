"""What a run leaves behind: its folder, the journal in it (the truth), and the MLflow mirror of that journal."""

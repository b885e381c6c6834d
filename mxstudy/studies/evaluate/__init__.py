"""The evaluation study: the evaluation of a checkpoint on tasks, with or without shots."""

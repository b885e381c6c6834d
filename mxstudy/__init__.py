"""mxstudy: a laboratory for training language models in microscaling (MX) formats."""

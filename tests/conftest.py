import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)  # the models of the tests are too small for two

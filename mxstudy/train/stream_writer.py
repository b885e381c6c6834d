"""Write a checkpoint's tensors to their file one after another, without a copy of the whole file in memory.

torch's own writer makes the file in memory first. That takes most of the time of a save, and three times the memory of
the tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class StreamWriter(HuggingFaceStorageWriter):
    """Write the safetensors file of each rank for torch.distributed.checkpoint, like torch's writer. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder
        self.written: dict[Path, dict[str, Tensor]] = {}  # this rank's file, with its tensors on the CPU

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {item.index.fqn: on_cpu(cast(Tensor, planner.resolve_data(item))) for item in plan.items}
        places = {i.index.fqn: {"saved_offsets": i.tensor_data.chunk.offsets} for i in plan.items if i.tensor_data}
        if tensors:
            path = self.folder / f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
            path.touch()
            mode = path.stat().st_mode  # as the umask has it; safetensors would let nobody else read the file
            try:
                save_file(tensors, path, metadata=about)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            path.chmod(mode)
            self.written[path] = tensors
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return written


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU that shares its memory with no other one of the checkpoint."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

"""What a parameter sharded over several ranks (a DTensor) needs; nothing else here knows of them."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    # No DTensor exists before its module is imported, and importing it costs every user half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_of(tensor: Tensor) -> "DeviceMesh | None":
    """The ranks a tensor is spread over; one foreach call cannot mix two meshes."""
    return tensor.device_mesh if _is_sharded(tensor) else None


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank (a collective call for a sharded one)."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def is_writer() -> bool:
    """Whether this process writes what all ranks agree on."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def wait_for_all() -> None:
    """Return once every rank is here."""
    if _is_distributed():
        torch.distributed.barrier()


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

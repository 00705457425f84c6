"""Tensors in shards on disk, by torch.distributed.checkpoint in its format of safetensors."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.lm.parallel import Ranks, is_sharded


def write_shards(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write this rank's shards of tensors into a folder. All ranks must call it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _one_error():
        save(dict(tensors), storage_writer=writer, process_group=ranks.host)


def read_shards(folder: Path, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors by name; like a sharded one of the same shape, only this rank's part."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {}
    for name, own in like.items():
        size, dtype = saved[name].size, saved[name].properties.dtype
        if own is not None and is_sharded(own) and own.shape == size:
            tensors[name] = torch.empty_like(own, dtype=dtype)
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    with _one_error(), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads its own
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@contextmanager
def _one_error() -> Iterator[None]:
    """Replace a list of all ranks' errors by the first rank's error, with its rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(first, OSError):
            raise OSError(
                first.errno, f"on rank {rank}: {first.strerror or first}", first.filename
            ) from error
        raise RuntimeError(f"on rank {rank}: {first!r}") from error

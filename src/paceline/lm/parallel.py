"""Several processes that train one model: who takes which share, what they agree on, how a model is spread.

Nothing else in the engine knows how many there are. One process is `ALONE`, and talks to nobody. Started by
torchrun, each process is a rank:

.. code-block:: text

    samples of a step, the same for any number of ranks → a share for each rank → gradients, summed over ranks
        → loss, norm of the gradient and "was I asked to stop?", summed in one message → all do the same

With DDP every rank has the whole model. With FSDP2 weights, gradients and what the optimizer remembers are
cut into shards; with `shards` fewer than ranks there are several such copies (HSDP).
"""

import hashlib
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, final

import torch
from torch import Tensor, nn

from paceline.lm.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

# A message of a step that does not come: the first may wait for others to compile.
_STEP_TIMEOUT = timedelta(minutes=10)
# One rank prepares data or writes while others wait. One that dies is noticed at once all the same.
_PATIENCE = timedelta(days=1)
_PORT = "paceline-port"


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranks:
    """The processes of a run, seen from one of them.

    What is called a collective must be called by all of them, in the same order.

    >>> ALONE.is_first, ALONE.rounds(5, 2)
    (True, [range(0, 2), range(2, 4), range(4, 5)])
    >>> Ranks(rank=1, size=2).rounds(5, 2)  # the other has 0 and 1, and waits in the second round
    [range(2, 4), range(4, 5)]
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """Of this rank; None: alone, and whatever the run says."""
    mesh: "DeviceMesh | None" = None
    """Over which weights are cut into shards; None: every rank has all of them."""
    host: "ProcessGroup | None" = None
    """For what is said between hosts, and not between devices."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    @property
    def copies(self) -> int:
        """How many ranks hold the same part of a gradient."""
        return self.size if self.mesh is None else self.size // self.mesh["shards"].size()

    # --- Shares ---

    def rounds(self, count: int, size: int) -> list[range]:
        """Which of `count` things are this rank's, at most `size` at a time.

        As many rounds as any rank has: one with fewer has nothing in its last.
        """
        own = range(self.rank * count // self.size, (self.rank + 1) * count // self.size)
        most = -(-count // self.size)
        return [own[at : at + size] for at in range(0, most, size)]

    def parts(self, batch: Batch, size: int) -> list[Batch]:
        """This rank's share of a batch, at most `size` samples at a time, as many parts on every rank.

        Where it has nothing, a sample without targets: its gradient is 0, and collectives inside of the
        model need everyone.
        """
        if self.size == 1:
            return batch.split(size)
        rounds = self.rounds(len(batch.tokens), size)
        return [batch.at(own) if own else batch.at(range(1)).silent() for own in rounds]

    def reseed(self, seed: int, step: int) -> None:
        """Random numbers of a step, for dropout: other ones on each rank, and the same whenever it is taken.

        Alone they go on from where they were, and are saved.
        """
        if self.size > 1:
            hashed = hashlib.blake2b(f"{seed} {step} {self.rank}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(hashed) >> 1)

    # --- Sums and agreement: collectives ---

    def known(
        self, loss: Tensor, norm: Tensor, stop: Callable[[], bool]
    ) -> tuple[float, float, Tensor, bool]:
        """What the host wants to know of a step, in one message and one wait for the device.

        Of the loss and the norm of the gradient of this rank's share: those over all ranks, the norm as a
        tensor too, and whether any was asked to stop.
        """
        if self.size == 1:
            known_loss, known_norm = torch.stack([loss, norm]).tolist()
            return known_loss, known_norm, norm, False
        # Squares in float64: those of float32 neither overflow nor round there.
        square = norm.double().square() / self.copies
        sums = torch.stack([loss.double(), square, torch.full_like(square, float(stop()))])
        torch.distributed.all_reduce(sums)
        total = sums[1].sqrt().to(norm.dtype)
        known_loss, known_square, stops = sums.tolist()
        return known_loss, math.sqrt(known_square), total, stops > 0

    def summed(self, total: Tensor, count: int) -> tuple[float, int]:
        """A sum on the device and one on the host, over all ranks."""
        if self.size == 1:
            return total.item(), count
        sums = torch.stack([total, torch.full_like(total, count)])
        torch.distributed.all_reduce(sums)
        known, counted = sums.tolist()
        return known, round(counted)

    def any(self, fact: bool) -> bool:
        """Whether something is true on any rank."""
        if self.size == 1:
            return fact
        found = torch.tensor(int(fact))
        torch.distributed.all_reduce(found, group=self.host)
        return bool(found)

    def hears(self, stop: Callable[[], bool], agreed: bool | None) -> bool:
        """Whether to stop before the next step: alone at once, else if it was agreed on in the last one."""
        if self.size > 1 and agreed is not None:
            return agreed
        return self.any(stop())

    def of_first(self, work: Callable[[], T]) -> T:
        """What work gives on the first rank, which alone does it, or the error that it raises there."""
        if self.size == 1:
            return work()
        said: list[Any] = [_tried(work) if self.is_first else None]
        torch.distributed.broadcast_object_list(said, src=0, group=self.host)
        value, error = said[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T]) -> list[T]:
        """What work gives on each rank. If it fails on one, all raise its error, with its rank."""
        if self.size == 1:
            return [work()]
        said: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(said, _tried(work), group=self.host)
        for rank, (_, error) in enumerate(said):
            if error is not None:
                raise _named(error, rank)
        return [value for value, _ in said]

    # --- The model ---

    def spread(self, model: nn.Module, device: torch.device) -> tuple[nn.Module, nn.Module]:
        """A model on its device, or on all of theirs, and what to call for a loss whose gradient is summed.

        The weights must be the same on every rank; they are where their seed is.
        """
        if self.mesh is not None:
            return _sharded(model, self.mesh)
        model = model.to(device)
        if self.size == 1:
            return model, model
        from torch.nn.parallel import DistributedDataParallel

        ids = [device.index] if device.type == "cuda" else None
        with warnings.catch_warnings():
            # torch 2.13 has another name for it, which earlier ones do not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            called = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
        called.register_comm_hook(None, lambda state, bucket: _summed(bucket))
        # Attributes go in this order. Were DDP's reducer the last to let go of the group, it would wait for
        # the group's threads and keep Python's lock, which one of them may want; Python gives that up first.
        called.group_to_the_end = called.process_group  # type: ignore[assignment]
        return model, called

    def reducing(self, called: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a part of a step: gradients are summed over ranks at the last."""
        if self.size == 1:
            return nullcontext()
        if self.mesh is None:
            return nullcontext() if last else called.no_sync()  # type: ignore[operator]
        called.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


ALONE = Ranks()


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    """An error that another process can take in."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    kind = type(error)
    if kind.__module__.startswith("paceline.") or kind in (ValueError, RuntimeError):
        return kind(str(error))
    return RuntimeError(f"{kind.__name__}: {error}")


def _named(error: Exception, rank: int) -> Exception:
    if isinstance(error, OSError):
        return OSError(error.errno, f"on rank {rank}: {error.strerror}", error.filename)
    return type(error)(f"on rank {rank}: {error}")


# --- How a model is spread ----------------------------------------------------------------------------


def _summed(bucket: Any) -> Any:
    """Gradients of ranks add up: each is of its share of the mean. (DDP by itself would divide.)"""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _sharded(model: nn.Module, mesh: "DeviceMesh") -> tuple[nn.Module, nn.Module]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*_blocks(model), model):
        # Cut again after every pass: while the whole stands there, an average that is shown would be seen in
        # the shards only.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # Nothing here works in place on what a model gives: summed_loss casts it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)  # they add up: each is of its share of the mean
    return model, model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model: what its outermost lists hold."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


# --- Tensors in shards --------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is spread over ranks."""
    # No such tensor exists before its module is imported, and importing it costs one process half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor


def cut_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, cut as another one of its shape is; without communication."""
    if not is_sharded(tensor) or whole.shape != tensor.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )


# --- Meeting the others -------------------------------------------------------------------------------


@contextmanager
def joined(*, how: str = "ddp", shards: int | None = None, device: str = "auto") -> Iterator[Ranks]:
    """The ranks that torchrun started, or `ALONE`.

    Arguments:
        how: "ddp" or "fsdp2".
        shards: how many ranks share one copy of the weights (fsdp2); None: all.
        device: "cpu", "cuda", or "auto": GPUs where there are some, each rank its own.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    own = _device(device)
    if shards is not None and (shards < 1 or size % shards):
        raise ValueError(f"shards is {shards}; allowed: what divides the number of ranks, {size}")
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    rank = int(os.environ["RANK"])
    # Held to the end: without torchrun it is in the first rank, and others may not have read it yet.
    kept, _, _ = next(rendezvous("env://", timeout=_STEP_TIMEOUT))
    on_gpu = own.type == "cuda"
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store(kept, rank, size),
        rank=rank,
        world_size=size,
        timeout=_STEP_TIMEOUT,
        device_id=own if on_gpu else None,
    )
    host = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    mesh = None
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh

        across = shards or size
        shape = {"copies": size // across, "shards": across} if across < size else {"shards": across}
        mesh = init_device_mesh(own.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    ranks = Ranks(rank=rank, size=size, device=own, mesh=mesh, host=host)
    try:
        yield ranks
        distributed.barrier(group=host)
    except BaseException:
        # Others may be gone: nothing is said to them any more.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    # torchrun asks all to stop as soon as one has left with an error.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    distributed.destroy_process_group()


def _store(kept: "Store", rank: int, size: int) -> "Store":
    """Where ranks find each other: a place that the first opens, and that goes with it.

    torchrun's own is kept when it starts ranks again, with the addresses of the dead in it. So all that is
    read there is where the first is; if nobody answers, it is an old one, and a new one will come.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        opened = TCPStore(host, 0, size, True, _STEP_TIMEOUT, wait_for_workers=False)
        kept.set(_PORT, str(opened.port))
        return opened
    until = time.monotonic() + _STEP_TIMEOUT.total_seconds()
    while True:
        port = int(kept.get(_PORT))
        try:
            socket.create_connection((host, port), timeout=10).close()
            return TCPStore(host, port, size, False, _STEP_TIMEOUT)
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"rank 0 was not found at {host}, port {port}: {error}") from error
            time.sleep(0.2)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise ValueError(f"device is {name!r}; allowed with several ranks: auto, cpu, cuda")
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise ValueError(f"rank {number} of this machine has no GPU: there are {there}; start fewer ranks")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)

"""PACE in Lightning: validated, saved and returned is the average.

Run `python examples/lightning_example.py FOLDER`, or `torchrun --nproc-per-node 2` the same file: several
processes shard by FSDP2. A small network learns a noisy curve. Only lines marked # PACE are not AdamW's.
"""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from paceline import PACE, Control  # PACE
from paceline.integrations.lightning import AveragedModelCallback  # PACE

RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun


class Curve(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def configure_model(self) -> None:
        if RANKS > 1 and not isinstance(self.net, FSDPModule):
            for layer in (*self.net, self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return PACE(self.parameters(), lr=1e-2, control=Control.push())  # PACE


def curve(rows: int, noise: float) -> TensorDataset:
    x = torch.rand(rows, 1) * 6 - 3
    return TensorDataset(x, torch.sin(2 * x) + noise * torch.randn(rows, 1))


def main(out: Path) -> None:
    L.seed_everything(0, verbose=False)
    train = DataLoader(curve(1024, noise=0.5), batch_size=16 // RANKS, shuffle=True)
    held_out = DataLoader(curve(1024, noise=0.0), batch_size=1024)
    best = ModelCheckpoint(out, monitor="loss")
    sharded = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    trainer = L.Trainer(
        default_root_dir=out,
        max_epochs=6,
        accelerator="auto",
        devices=RANKS,
        strategy=sharded if RANKS > 1 else "auto",
        logger=False,
        callbacks=[best, AveragedModelCallback()],  # PACE; in any order
    )
    module = Curve()
    trainer.fit(module, train, held_out)  # after a crash ckpt_path="last", or a file, resumes

    (optimizer,) = trainer.optimizers
    for what in ("average", "live"):  # after a fit the module holds the average
        if what == "live":
            optimizer.train()
        (metrics,) = trainer.validate(module, held_out, verbose=False)
        if trainer.is_global_zero:
            print(f"{what:>8}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

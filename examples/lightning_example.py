"""PACE in Lightning: validated, saved and returned is the average.

Run `python examples/lightning_example.py`. A small network learns a noisy curve, on a CPU, in seconds. Only
the lines marked # PACE differ from training with AdamW.
"""

import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import PACE, Control  # PACE
from paceline.integrations.lightning import AveragedModelCallback  # PACE


class Curve(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return PACE(self.parameters(), lr=1e-2, control=Control.push())  # PACE


def curve(rows: int, noise: float) -> TensorDataset:
    x = torch.rand(rows, 1) * 6 - 3
    return TensorDataset(x, torch.sin(2 * x) + noise * torch.randn(rows, 1))


def main(out: Path) -> None:
    L.seed_everything(0, verbose=False)
    train = DataLoader(curve(1024, noise=0.5), batch_size=16, shuffle=True)
    held_out = DataLoader(curve(1024, noise=0.0), batch_size=1024)
    best = ModelCheckpoint(out, monitor="loss")
    trainer = L.Trainer(
        default_root_dir=out,
        max_epochs=6,
        accelerator="cpu",
        callbacks=[best, AveragedModelCallback()],  # PACE; in any order
    )
    module = Curve()
    trainer.fit(module, train, held_out)  # after a crash ckpt_path="last", or a file, resumes
    trainer.validate(module, held_out, ckpt_path="best", verbose=False)

    file = torch.load(best.best_model_path, weights_only=True)
    for what, weights in (
        ("returned", module.state_dict()),  # of the best epoch, which validate() loaded
        ("average", file["state_dict"]),  # so does Curve.load_from_checkpoint(best.best_model_path)
        ("live", file["current_model_state"]),
    ):
        other = Curve()
        other.load_state_dict(weights)
        (metrics,) = trainer.validate(other, held_out, verbose=False)
        print(f"{what:>8}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))

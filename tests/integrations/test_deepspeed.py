"""PACE under DeepSpeed's ZeRO in the Trainer of transformers: real engines, two processes on a CPU.

DeepSpeed is built where it is installed and is no part of development; without it this is skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

PROGRAM = """
import sys, torch, test_huggingface as t
torch.set_num_threads(1)
folder, stage, bf16 = t.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "bfloat16"
names = ["train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"]
engine = dict.fromkeys([*names, "gradient_clipping"], "auto")
engine |= {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}}

def run(name="out", settings={}, **changes):
    settings = {"gain": "paper", "pullback_strength": 0.05, **settings}
    zero = {"deepspeed": engine} if stage else {}  # else DDP
    return t.trainer_of(t.llama(), folder / name, settings=settings, bf16=bf16, **zero, **changes)

def end(trainer):
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    return losses, t.weights_of(trainer.model)
"""

RESUMED = """
straight, resumed = run(), run()
straight.train()
losses, returned = end(straight)
resumed.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4"))
again, returned_again = end(resumed)
assert losses[8] == again[8] and all(torch.equal(returned[name], returned_again[name]) for name in returned)
assert straight.evaluate()["eval_loss"] == losses[8]
straight.save_model(folder / "returned")
torch.distributed.barrier()
last = folder / "out" / "checkpoint-8"
for saved, same in ((folder / "returned", True), (last / "averaged", True), (last, False)):
    dtype = next(iter(returned.values())).dtype
    weights = t.weights_of(t.AutoModelForCausalLM.from_pretrained(saved, dtype=dtype))
    assert all(torch.equal(weights[name], returned[name]) for name in returned) == same, saved
"""

BEST = """
best = run(load_best_model_at_end=True)
best.train()
losses, _ = end(best)
assert losses[4] < losses[8] and best.state.best_model_checkpoint.endswith("checkpoint-4")
assert best.evaluate()["eval_loss"] == losses[4]
"""

REFUSED = """
for settings, reason in (
    ({"gain": "scaled", "pullback_strength": None}, 'gain="scaled" needs sums over the whole model'),
):
    try:
        run(settings=settings).train()
    except ValueError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(reason)
"""

WITHOUT_CALLBACK = """
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from paceline import PACE, averaged_weights
plain = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
plugin = DeepSpeedPlugin(hf_ds_config=plain | {"zero_optimization": {"stage": stage}})
accelerator, model = Accelerator(deepspeed_plugin=plugin), t.llama()
model, optimizer = accelerator.prepare(model, PACE(model.parameters(), lr=1e-2))
try:
    with averaged_weights(optimizer):
        raise AssertionError("not refused")
except RuntimeError as error:
    assert "trains flat copies" in str(error), error
"""

STAGE_3 = """
try:
    run().train()
except ValueError as error:
    assert "use ZeRO stage 1 or 2" in str(error), error
else:
    raise AssertionError("not refused")
"""

SAVED = """
trainer = run()
trainer.train()
if trainer.args.process_index == 0:
    torch.save(end(trainer), folder / "end.pt")
"""


def on_two_ranks(code, folder, stage, dtype="float32"):
    folder.mkdir(exist_ok=True)
    (folder / "rank.py").write_text(PROGRAM + code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [*command, folder / "rank.py", folder, str(stage), dtype],
        env=os.environ | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("stage, dtype", [(1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_resumed_run_ends_as_an_uninterrupted_one_and_all_that_is_saved_is_the_average(
    stage, dtype, tmp_path
):
    on_two_ranks(RESUMED, tmp_path, stage, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_best_model_is_the_best_average(stage, tmp_path):
    on_two_ranks(BEST, tmp_path, stage)


@pytest.mark.slow
def test_it_comes_to_what_it_does_under_ddp(tmp_path):
    ends = []
    for stage in (0, 2):
        on_two_ranks(SAVED, tmp_path / str(stage), stage)
        ends.append(torch.load(tmp_path / str(stage) / "end.pt"))
    (losses, weights), (zero_losses, zero_weights) = ends
    assert zero_losses == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(zero_weights[name], weight, rtol=0, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("code, stage", [(REFUSED, 2), (WITHOUT_CALLBACK, 2), (STAGE_3, 3)])
def test_what_deepspeed_hides_is_refused(code, stage, tmp_path):
    on_two_ranks(code, tmp_path, stage)

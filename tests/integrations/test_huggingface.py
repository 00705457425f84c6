"""The Trainer of transformers with PACE: real Trainers, real files, models of a few thousand weights."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_callback import TrainerCallback  # noqa: E402

from paceline import PACE, Averages, PowerLaw, Pullback  # noqa: E402
from paceline.integrations.huggingface import AveragedModelCallback, pace_for_trainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # torch's, on CPUs without bfloat16
    # that of transformers before 5.22, of checkpoints made within a second
    pytest.mark.filterwarnings("ignore:mtime may not be reliable"),
]

DATA = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(32, (48, 8), generator=torch.Generator().manual_seed(1))
]
# When evaluation runs, as eval_steps, beside a checkpoint every 4 of 8 steps.
WHEN = {"never": None, "on the save step": 4, "before": 3, "after": 5, "every step": 1}


@pytest.fixture(autouse=True, scope="module")
def quick_collection():
    """A Trainer collects garbage when it starts: a third of a short run, over objects of others."""
    gc.freeze()
    yield
    gc.unfreeze()


def llama(tied=False, dtype=torch.float32):
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_frozen_layer():
    model = llama()
    model.model.layers[0].requires_grad_(False)
    return model


def with_dropout():
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)  # tied too, and without a gap to remember but the RNG's


def with_lora():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def with_two_trained_parts():
    """An adapter with a name of its own, and a whole layer trained beside it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(llama(), config, adapter_name="mine")


MODELS = {
    "plain": llama,
    "tied": lambda: llama(tied=True),
    "frozen": with_frozen_layer,
    "dropout": with_dropout,
    "bfloat16": lambda: llama(dtype=torch.bfloat16),
    "lora": with_lora,
    "named lora": with_two_trained_parts,
}


def arguments(folder, when="on the save step", **changes):
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-2,
        "weight_decay": 0.1,
        "save_steps": 4,
        "eval_strategy": "no" if WHEN[when] is None else "steps",
        "eval_steps": WHEN[when],
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **settings | changes)


def trainer_of(model, folder, callbacks=None, settings=None, **changes):
    args = arguments(folder, **changes)
    return Trainer(
        model,
        args,
        train_dataset=DATA[:32],
        eval_dataset=DATA[32:],
        optimizer_cls_and_kwargs=pace_for_trainer(args, **settings or {}),
        callbacks=[AveragedModelCallback()] if callbacks is None else callbacks,
    )


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def loss_of(model, folder):
    """As the Trainer reports it, of a model without an optimizer."""
    return Trainer(model, arguments(folder), eval_dataset=DATA[32:]).evaluate()["eval_loss"]


def end_of(trainer):
    """All that a run comes to: losses by step, live, average."""
    losses = {
        (entry["step"], key): entry[key]
        for entry in trainer.state.log_history
        for key in ("loss", "grad_norm", "eval_loss")
        if key in entry
    }
    trainer.optimizer.eval()
    average = weights_of(trainer.model)
    trainer.optimizer.train()
    return losses, weights_of(trainer.model), average


def assert_same_end(a, b):
    losses, *weights = a
    assert losses == b[0]
    for mine, other in zip(weights, b[1:], strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def weight_files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("**/*.safetensors")}


RUNS = [
    *(("plain", when, True, {}) for when in WHEN),
    *((name, "before", True, {}) for name in MODELS if name != "plain"),
    ("lora", "on the save step", True, {}),
    ("plain", "on the save step", True, {"gradient_accumulation_steps": 2}),
    ("plain", "before", True, {"settings": {"average_dtype": "int8"}}),
    *(("plain", when, False, {}) for when in ("on the save step", "before")),
    ("lora", "on the save step", False, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, when, with_callback, changes", RUNS)
def test_resumed_run_ends_as_an_uninterrupted_one(name, when, with_callback, changes, tmp_path):
    """To the bit, and without the callback too: a checkpoint then holds either set of weights, and both."""
    callbacks = None if with_callback else []
    straight = trainer_of(MODELS[name](), tmp_path, callbacks, when=when, **changes)
    straight.train()
    files = weight_files(tmp_path / "checkpoint-8")
    resumed = trainer_of(MODELS[name](), tmp_path, callbacks, when=when, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 8
    assert_same_end(end_of(straight), end_of(resumed))
    assert weight_files(tmp_path / "checkpoint-8") == files
    _, live, average = end_of(resumed)
    assert any(not torch.equal(live[k], average[k]) for k in live)
    step = next(iter(resumed.optimizer.state.values()))["step"]
    assert step == 8  # also where each takes several batches


@pytest.mark.slow
def test_checkpoints_hold_live_and_average_whenever_evaluation_runs(tmp_path):
    found = []
    for when in WHEN:
        trainer = trainer_of(llama(), tmp_path / when, when=when)
        trainer.train()
        found.append(weight_files(tmp_path / when / "checkpoint-8"))
    assert found[0].keys() == {"model.safetensors", "averaged/model.safetensors"}
    assert all(files == found[0] for files in found[1:])
    _, live, average = end_of(trainer)
    for weights, folder in ((live, "."), (average, "averaged")):
        saved = load_file(tmp_path / when / "checkpoint-8" / folder / "model.safetensors")
        assert all(torch.equal(saved[name], weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "tied", "frozen", "bfloat16"])
def test_averaged_folder_and_final_model_have_the_loss_that_was_reported(name, tmp_path, caplog):
    trainer = trainer_of(MODELS[name](), tmp_path)
    with caplog.at_level(logging.WARNING, "paceline"):
        trainer.train()
    assert "holds the average of its weights as of the last step" in caplog.text
    reported = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    for step in (4, 8):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}" / "averaged")
        assert loss_of(model, tmp_path) == reported[step]
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    assert loss_of(live, tmp_path) != reported[8]
    for _ in range(2):  # before an evaluation and after it
        trainer.save_model(str(tmp_path / "final"))
        assert loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "final"), tmp_path) == reported[8]
        assert trainer.evaluate()["eval_loss"] == reported[8]
        trainer.predict(DATA[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "named lora"])
def test_averaged_adapter_has_the_loss_that_was_reported(name, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = trainer_of(MODELS[name](), tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    reported = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    adapter = trainer.model.active_adapters[0]
    final = tmp_path / "final" if adapter == "default" else tmp_path / "final" / adapter
    averaged = tmp_path / "checkpoint-4" / "averaged" / adapter
    for folder, loss in ((averaged, reported[0]), (final, reported[1])):
        assert loss_of(peft.PeftModel.from_pretrained(llama(), folder), tmp_path) == loss
    assert not (averaged / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, settings",
    [
        ("plain", {}),
        ("bfloat16", {}),
        ("lora", {}),
        ("plain", {"average_dtype": "int8"}),
    ],
)
def test_best_model_is_the_best_average(name, settings, tmp_path):
    """The first: from then on noise is learned by heart."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = trainer_of(MODELS[name](), tmp_path, settings=settings, save_total_limit=1, **best)
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-4"
    assert not (tmp_path / "checkpoint-8").exists()
    losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert losses[1] > losses[0] == trainer.state.best_metric
    trainer.save_model(str(tmp_path / "final"))
    assert trainer.evaluate()["eval_loss"] == losses[0]
    if name == "lora":
        import peft

        model = peft.PeftModel.from_pretrained(llama(), tmp_path / "final")
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loss_of(model, tmp_path) == losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Pullback", "Averages"])
def test_other_optimizers_with_an_average(kind, tmp_path):
    def run(checkpoint=None):
        model = llama()
        base = torch.optim.AdamW(model.parameters(), lr=3e-2)
        wrapped = (
            Pullback(base, gain="scaled") if kind == "Pullback" else Averages(base, {"a": PowerLaw(0.7)})
        )
        data = {"train_dataset": DATA[:32], "eval_dataset": DATA[32:], "callbacks": [AveragedModelCallback()]}
        args = arguments(tmp_path, load_best_model_at_end=True)
        trainer = Trainer(model, args, **data, optimizers=(wrapped, None))
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
        return trainer

    straight = run()
    resumed = run(str(tmp_path / "checkpoint-4"))
    assert_same_end(end_of(straight), end_of(resumed))
    best = AutoModelForCausalLM.from_pretrained(Path(straight.state.best_model_checkpoint) / "averaged")
    assert loss_of(best, tmp_path) == straight.state.best_metric


@pytest.mark.slow
def test_evaluation_that_failed_or_was_called_by_another_callback_leaves_live(tmp_path):
    class Predicts(TrainerCallback):
        def on_step_end(self, *_, **__):
            trainer.predict(DATA[:4])
            with pytest.raises(ZeroDivisionError):
                trainer.evaluate(eval_dataset=Failing())
            assert trainer.optimizer.optimizer.shows_average()  # until the next batch

    class Failing(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            raise ZeroDivisionError

    trainer = trainer_of(llama(), tmp_path / "a", [AveragedModelCallback(), Predicts()], when="never")
    trainer.train()
    plain = trainer_of(llama(), tmp_path / "b", when="never")
    plain.train()
    assert_same_end(end_of(trainer), end_of(plain))


@pytest.mark.slow
def test_training_goes_on_from_live(tmp_path):
    """In the same Trainer; a checkpoint cannot be loaded into it before live is back, and that is said."""
    trainer = trainer_of(llama(), tmp_path)
    trainer.train()
    with pytest.raises(ValueError, match=r"train\(\)"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    trainer.optimizer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    straight = trainer_of(llama(), tmp_path / "straight")
    straight.train()
    assert_same_end(end_of(trainer), end_of(straight))
    live = weights_of(trainer.model)
    trainer.optimizer.eval()
    seen = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            seen.append(weights_of(model))

    trainer.add_callback(Looks())
    trainer.train()
    assert all(torch.equal(seen[0][name], live[name]) for name in live)


def test_settings_are_those_of_the_training_arguments(tmp_path):
    trainer = trainer_of(
        llama(), tmp_path, adam_beta2=0.95, adam_epsilon=1e-6, settings={"return_power": 0.8}
    )
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, PACE)
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        expected = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": decay, "return_power": 0.8}
        assert {key: group[key] for key in expected} == expected
    with pytest.raises(ValueError, match=r"Invalid weight_decay=0.2: .* give it to TrainingArguments"):
        pace_for_trainer(trainer.args, weight_decay=0.2)


class Hidden(FullyShardedDataParallel):
    """What the callback sees of FSDP1, without a process group."""

    def __init__(self, model):
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = model


@contextmanager
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_what_would_not_end_with_the_average_is_refused_before_the_first_step(tmp_path):
    model = llama()
    trainer = trainer_of(model, tmp_path)
    begin = AveragedModelCallback().on_train_begin
    optimizer = AcceleratedOptimizer(PACE(model.parameters()))
    adamw = AcceleratedOptimizer(torch.optim.AdamW(model.parameters()))
    engine = SimpleNamespace(optimizer=PACE(model.parameters()), param_groups=[])
    deepspeed = DeepSpeedOptimizerWrapper(engine)
    begin(trainer.args, trainer.state, trainer.control, model=model, optimizer=optimizer)

    def assert_refused(reason, model=model, optimizer=optimizer, error=ValueError, **changes):
        args = arguments(tmp_path, **changes)
        with pytest.raises(error, match=reason):
            begin(args, trainer.state, trainer.control, model=model, optimizer=optimizer)

    assert_refused("FSDP1 hides the parameters", model=Hidden(model))
    with one_rank() as mesh:
        sharded = llama()
        fully_shard(sharded, mesh=mesh)
        assert_refused("sharded by FSDP2", model=sharded, optimizer=PACE(sharded.parameters()))
    assert_refused("hides the parameters.*use ZeRO stage 1 or 2", optimizer=deepspeed)
    assert_refused("PACE trains parameters that are not the model's own", model=llama())
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    assert_refused("save_only_model=True: the best average is loaded", save_only_model=True, **best)
    assert_refused("AdamW keeps no average", optimizer=adamw, error=TypeError)


@pytest.mark.slow
def test_supervised_fine_tuning_with_trl(tmp_path):
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *"abcdefgh"])}
    level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=level, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    data = datasets.Dataset.from_list(
        [{"prompt": "a b c d", "completion": " e f g " + w} for w in "abcdefgh"]
    )

    def sft(folder, lora):
        shared = arguments(folder).to_dict()
        names = ("max_steps", "learning_rate", "save_steps", "eval_strategy", "eval_steps", "logging_steps")
        more = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
        args = trl.SFTConfig(str(folder), **{name: shared[name] for name in names}, **more)
        return trl.SFTTrainer(
            llama(),
            args,
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
            optimizer_cls_and_kwargs=pace_for_trainer(args),
            callbacks=[AveragedModelCallback()],
        )

    for lora in (False, True):
        folder = tmp_path / str(lora)
        straight = sft(folder, lora)
        straight.train()
        resumed = sft(folder, lora)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        loss = [e["eval_loss"] for e in straight.state.log_history if "eval_loss" in e][-1]
        assert resumed.evaluate()["eval_loss"] == loss
        assert_same_end(end_of(straight), end_of(resumed))
        averaged = folder / "checkpoint-8" / "averaged" / ("default" if lora else "")
        assert transformers.AutoTokenizer.from_pretrained(averaged).vocab_size == len(words)


class Slowly(TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(0.3)


@pytest.mark.long
def test_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    changes = {"max_steps": 10, "save_steps": 2, "when": "every step"}
    code = (
        "import torch; torch.set_num_threads(1); import test_huggingface as t\n"
        "callbacks = [t.AveragedModelCallback(), t.Slowly()]\n"
        f"t.trainer_of(t.llama(), {str(tmp_path)!r}, callbacks, **{changes}).train()"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "checkpoint-4" / "averaged").exists():
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert not (tmp_path / "checkpoint-10").exists()
    # The Trainer writes its state last: a checkpoint without it was cut short.
    complete = [int(f.parent.name.split("-")[1]) for f in tmp_path.glob("checkpoint-*/trainer_state.json")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resumed = trainer_of(llama(), tmp_path, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{max(complete)}"))
        straight = trainer_of(llama(), tmp_path / "straight", **changes)
        straight.train()
    finally:
        torch.set_num_threads(threads)
    assert_same_end(end_of(straight), end_of(resumed))
    last = "checkpoint-10"
    assert weight_files(tmp_path / last) == weight_files(tmp_path / "straight" / last)


class Skips(TrainerCallback):
    def __init__(self):
        self.by_step = []

    def on_optimizer_step(self, *_, optimizer, **__):
        self.by_step.append(optimizer.step_was_skipped)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="float16 in the Trainer needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"capturable": True}], ids=["usual", "skipped on the device"])
def test_steps_that_a_grad_scaler_skips_do_not_count(settings, tmp_path):
    def make():
        skips = Skips()
        callbacks = [AveragedModelCallback(), skips]
        changes = {"fp16": True, "use_cpu": False, "max_steps": 12, "settings": settings}
        trainer = trainer_of(llama(), tmp_path, callbacks, **changes)
        # Far too large at first: a few steps overflow before it is halved often enough.
        trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**26)
        return trainer, skips

    (straight, skips), (resumed, _) = make(), make()
    straight.train()
    taken = {state["step"].item() for state in straight.optimizer.optimizer.state.values()}
    if not settings:  # elsewhere nobody tells Accelerate
        assert any(skips.by_step) and taken == {skips.by_step.count(False)}
    assert len(taken) == 1 and 0 < taken.pop() < 12
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    ends = []
    for trainer in (straight, resumed):
        losses, *weights = end_of(trainer)
        # Norms of gradients that overflowed are NaN, which is not equal to itself.
        ends.append(({k: v for k, v in losses.items() if k[1] != "grad_norm"}, *weights))
    assert_same_end(*ends)
    loss = [e["eval_loss"] for e in straight.state.log_history if "eval_loss" in e][-1]
    averaged = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12" / "averaged")
    again = Trainer(averaged, arguments(tmp_path, fp16=True, use_cpu=False), eval_dataset=DATA[32:])
    assert again.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


RANK = """
import sys, torch; torch.set_num_threads(1); import test_huggingface as t
folder = t.Path(sys.argv[1])
best = t.trainer_of(t.llama(), folder, load_best_model_at_end=True)
best.train()
losses = [e["eval_loss"] for e in best.state.log_history if "eval_loss" in e]
assert best.args.world_size == 2 and losses[1] > losses[0] == best.evaluate()["eval_loss"]
straight, resumed = (t.trainer_of(t.llama(), folder) for _ in range(2))
straight.train()
resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
t.assert_same_end(t.end_of(straight), t.end_of(resumed))
if straight.args.process_index == 0:
    model = t.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-8" / "averaged")
    assert all(torch.equal(p, t.end_of(straight)[2][name]) for name, p in model.named_parameters())
"""


@pytest.mark.long
def test_two_processes(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", *command, tmp_path / "rank.py", tmp_path / "out"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

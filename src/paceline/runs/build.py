"""Building the parts that the loop trains from the description of a run, cheap checks first."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.lm import checkpoint
from paceline.lm.batch import First, Samples
from paceline.lm.chat import ChatFormat
from paceline.lm.evaluate import summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.loop import Plan, Trainee
from paceline.lm.parallel import ALONE, Ranks
from paceline.lm.shards import Windows
from paceline.runs import data, methods
from paceline.runs.config import ConfigError, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run, built."""

    trainee: Trainee
    plan: Plan
    returned: str
    """The name of the weights that are returned."""
    facts: dict[str, Any]
    """What the records say of data and model."""
    save_tokenizer: Callable[[Path], object]
    """Write what turns text into tokens to a folder: an export needs it, and data may change or go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Material:
    """Samples, and a model to train on them."""

    samples: Samples
    held_out: Samples
    model: nn.Module
    save_tokenizer: Callable[[Path], object]
    about: dict[str, Any]


def build(run: Run, tell: data.Tell, ranks: Ranks = ALONE) -> Job:
    """Build a run. From here on random numbers are drawn from its seed."""
    device = ranks.device or device_of(run.device)
    torch.manual_seed(run.seed)
    with data.inputs_named():
        material = (_sft if run.task == "sft" else _pretrain)(run, tell)
    model, called = ranks.spread(material.model, device)
    plan = _plan(run, material, device)
    optimizer = methods.make_optimizer(run, model, plan.steps)
    views, returned = methods.make_views(run, optimizer, model)
    held_out = material.held_out
    if run.held_out_samples is not None:
        held_out = First(held_out, run.held_out_samples)
    trainee = Trainee(
        model=model,
        optimizer=optimizer,
        scheduler=methods.make_schedule(run, optimizer, plan.steps),
        samples=material.samples,
        held_out={"held-out": held_out},
        views=views,
        loss_of=torch.compile(summed_loss) if run.compile else summed_loss,
        ranks=ranks,
        called=called,
    )
    about = {
        "samples": len(material.samples),
        "fingerprint": material.samples.fingerprint,
        "held_out_samples": len(held_out),
        "held_out_fingerprint": held_out.fingerprint,
        **material.about,
    }
    facts = {
        "data": about,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": plan.steps,
        "precision": str(plan.precision).removeprefix("torch."),
    }
    return Job(
        trainee=trainee, plan=plan, returned=returned, facts=facts, save_tokenizer=material.save_tokenizer
    )


def device_of(name: str) -> torch.device:
    """Return the device of that name; raise ConfigError for one that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


# --- What to train on what --------------------------------------------------------------------------


def _pretrain(run: Run, tell: data.Tell) -> _Material:
    from paceline.lm.vocabulary import vocabulary_of

    own = _is_own(run)
    model: nn.Module | None = None
    saver: Any = None
    tokenizer: Any = run.tokenizer
    if run.chat_template is not None:
        raise ConfigError("chat_template is for sft; pretraining has no conversations")
    if own:
        try:
            shape_of(run.model, 50257, run.length)  # a wrong name shows before data are prepared
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not own:
        if run.tokenizer != "auto":
            raise ConfigError(f"{run.model} has a tokenizer of its own; leave out tokenizer")
        model, saver = _pretrained(run)
        tokenizer = vocabulary_of(saver)
    text = data.prepare_text(
        run.data, run.held_out, tokenizer, "gpt2" if run.model == "gpt2" else "bpe:2048", tell
    )
    samples, held_out = (Windows(tokens, length=run.length) for tokens in (text.training, text.held_out))
    if model is None:
        model = _own(run, text.vocabulary.size)
    else:
        _check_fits(run, model, text.vocabulary.size)
    return _Material(
        samples=samples,
        held_out=held_out,
        model=model,
        save_tokenizer=text.vocabulary.save if saver is None else saver.save_pretrained,
        about={"tokens": text.training.count, "tokenizer": text.vocabulary.fingerprint},
    )


def _sft(run: Run, tell: data.Tell) -> _Material:
    from paceline.lm.pretrained import separates_examples

    if run.tokenizer != "auto":
        raise ConfigError(f"{run.model} has a tokenizer of its own; leave out tokenizer")
    data.check_chat_files((*run.data, *run.held_out))
    template = data.read_template(run.chat_template)
    model, tokenizer = _pretrained(run)
    if not separates_examples(model, model.vocabulary):
        raise ConfigError(
            f"{run.model} lets packed examples see each other, and paceline always packs; take another model"
        )
    if template is not None:
        tokenizer.chat_template = template  # also of the exported model
    chats = data.prepare_chats(run.data, run.held_out, tokenizer, run.length, tell)
    _check_fits(run, model, chats.training.vocabulary)
    return _Material(
        samples=chats.training,
        held_out=chats.held_out,
        model=model,
        save_tokenizer=tokenizer.save_pretrained,
        about={
            "tokenizer": chats.tokenizer,
            "chat": asdict(chats.training.report),
            "held_out_chat": asdict(chats.held_out.report),
        },
    )


def _is_own(run: Run) -> bool:
    return run.model.startswith("gpt:") or run.model == "gpt2"


def _own(run: Run, vocabulary: int) -> GPT:
    shape = shape_of(run.model, vocabulary, run.length)
    # Rows of the embedding that no token uses: GPUs multiply odd sizes at half the speed.
    shape = replace(shape, dropout=run.dropout, vocabulary_multiple=64)
    return GPT(shape, activation_checkpointing=run.activation_checkpointing)


def _check_fits(run: Run, model: Any, vocabulary: int) -> None:
    """Raise ConfigError for tokens or places that a pretrained model has not."""
    if vocabulary > model.vocabulary:
        raise ConfigError(
            f"{run.model} knows {model.vocabulary} tokens, its tokenizer has numbers up to {vocabulary - 1}"
        )
    places = getattr(model.whole.config, "max_position_embeddings", None)
    if places is not None and run.length > places:
        raise ConfigError(f"length is {run.length}; {run.model} has {places} positions")


def model_of(run: Run, tokenizer: Path) -> tuple[nn.Module, Callable[[Path], object]]:
    """Return the model of a run with new weights, and how to write it as a folder that transformers loads.

    No data are needed: the tokenizer is the one that was saved.
    """
    from paceline.lm.pretrained import export_folder, load_tokenizer
    from paceline.lm.vocabulary import open_vocabulary

    if _is_own(run):
        vocabulary = open_vocabulary(tokenizer)
        model: nn.Module = _own(run, vocabulary.size)
        return model, partial(export_folder, model, vocabulary)
    model, _ = _pretrained(run)
    return model, partial(export_folder, model, load_tokenizer(tokenizer))


@data.inputs_named()
def held_out_of(run: Run, tokenizer: Path, tell: data.Tell) -> Samples:
    """Return the samples to evaluate a run on, by the tokenizer that it has saved: without training data."""
    from paceline.lm.pretrained import load_tokenizer
    from paceline.lm.vocabulary import open_vocabulary, vocabulary_of

    samples: Samples
    if run.task == "sft":
        data.check_chat_files(run.held_out or run.data)
        form = ChatFormat(load_tokenizer(tokenizer))
        samples = data.held_out_chats(run.data, run.held_out, form, run.length, tell)
    else:
        vocabulary = open_vocabulary(tokenizer) if _is_own(run) else vocabulary_of(load_tokenizer(tokenizer))
        tokens = data.held_out_text(run.data, run.held_out, vocabulary, tell)
        samples = Windows(tokens, length=run.length)
    return samples if run.held_out_samples is None else First(samples, run.held_out_samples)


def _pretrained(run: Run) -> tuple[Any, Any]:
    from paceline.lm.pretrained import load_pretrained

    try:
        return load_pretrained(run.model, activation_checkpointing=run.activation_checkpointing)
    except (OSError, ValueError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the libraries underneath fail in any way at files that are not what they say
        raise ValueError(f"cannot load {run.model}: {error!r}") from error


# --- How long, how -----------------------------------------------------------------------------------


def _plan(run: Run, material: _Material, device: torch.device) -> Plan:
    if run.batch_size > (count := len(material.samples)):
        raise ConfigError(
            f"batch_size is {run.batch_size:,}; the data have {count:,} samples of {run.length}"
        )
    steps = steps_of(run, count, sum(p.numel() for p in material.model.parameters()))
    return Plan(
        steps=steps,
        batch_size=run.batch_size,
        micro_batch_size=min(run.micro_batch_size or run.batch_size, run.batch_size),
        seed=run.seed,
        clip_norm=run.clip_norm,
        precision=precision_of(run, device),
        evaluate_every=run.evaluate_every or max(1, steps // 10),
        max_skips=run.skip_nonfinite,
    )


def precision_of(run: Run, device: torch.device) -> torch.dtype:
    """Return the precision of matrix products."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    name = auto if run.precision == "auto" else run.precision
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def steps_of(run: Run, samples: int, parameters: int) -> int:
    """Return the number of steps in the budget of a run."""
    tokens_per_step = run.batch_size * run.length
    if run.steps is not None:
        return run.steps
    if run.epochs is not None:
        steps = run.epochs * samples / run.batch_size
    else:
        tokens = run.tokens if run.tokens is not None else 20 * (run.chinchilla or 0) * parameters
        steps = tokens / tokens_per_step
    if not 0.5 < steps < 2**63:
        raise ConfigError(f"the budget is {steps:.3g} steps; one step is {tokens_per_step:,} tokens")
    return round(steps)


# --- From another run ---------------------------------------------------------------------------------


def fork(job: Job, where: str, folder: Path) -> int:
    """Put the weights and the optimizer's state of another run's checkpoint into a job; return its step.

    Settings of the optimizer stay those of this run, which is in `folder`.
    """
    place = _checkpoint_named(where, folder)
    job.trainee.ranks.of_first(lambda: checkpoint.check(place))
    saved = checkpoint.read(place, checkpoint.named_tensors(job.trainee.model))
    step: int = saved["facts"]["progress"]["step"]
    if step >= job.plan.steps:
        raise ConfigError(f"fork {where!r} is of step {step}; this run ends at step {job.plan.steps}")
    was, now = (facts["data"].get("tokenizer") for facts in (saved["facts"], job.facts))
    if was != now:
        raise ConfigError(
            f"fork {where!r} is of a run with another tokenizer: its tokens would mean something else; "
            "give the one that it has, RUN/tokenizer"
        )
    trainee = job.trainee
    groups = trainee.optimizer.state_dict()["param_groups"]
    for group, before in zip(groups, saved["state"]["groups"], strict=True):
        group |= {name: before[name] for name in methods.REMEMBERED if name in before}
    saved["state"]["groups"] = groups
    checkpoint.restore(trainee.model, trainee.optimizer, saved)
    checkpoint.restore_random(saved)
    scheduler: Any = trainee.scheduler
    scheduler.last_epoch = step
    factors = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, (lr, factor) in zip(trainee.optimizer.param_groups, factors, strict=True):
        group["lr"] = lr * factor(step)
    return step


def _checkpoint_named(where: str, folder: Path) -> Path:
    """Return the checkpoint of RUN@STEP, of RUN (its newest), or in that folder; RUN may be a sibling."""
    path, _, step = where.rpartition("@")
    if not path or Path(where).is_dir():
        path, step = where, ""
    # First of all: there the run's own siblings are, wherever the command was called from.
    if Path(path).name == path and (folder.parent / path).is_dir():
        path = str(folder.parent / path)
    if step and not step.isdigit():
        raise ConfigError(f"fork {where!r}: {step!r} is no step")
    return checkpoint_of(Path(path), int(step) if step else None)


def checkpoint_of(folder: Path, step: int | None = None) -> Path:
    """Return the folder of a checkpoint of a run, the newest without a step, or that folder itself."""
    if (folder / "manifest.json").exists():
        if step is not None:
            raise ConfigError(f"{folder} is one checkpoint; step goes with the folder of a run")
        return folder
    found = dict(checkpoint.all_of(folder / "checkpoints"))
    if not found:
        raise ConfigError(f"{folder} holds no checkpoint")
    if step is not None and step not in found:
        raise ConfigError(f"{folder} has no checkpoint of step {step}; there are: {sorted(found)}")
    return found[max(found) if step is None else step]

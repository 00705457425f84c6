"""Loops of one's own for the battery, of Accelerate and of torch alone."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from watching import STEPS, TOKENS, Run, Watch, Weights, loader_of, loss_of, share

from paceline import averaged_weights, save_averaged


def shard(model: nn.Module, run: Run, mesh: Any = None) -> nn.Module:
    """Shard a Llama as people do: layers by themselves, embedding and head with the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=run.reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=run.reshard)


def loop(run: Run, watch: Watch, model: nn.Module, rows: Any, step_on: Any, save: Any) -> Watch:
    """Train, evaluate and save; `step_on` gets tokens, and returns whether their gradient ended a step."""
    step, evaluated = run.resume, share(TOKENS[24:], run)
    while step < STEPS:
        for tokens in islice(rows, step * run.accumulate % len(rows), None):
            if not step_on(tokens):
                continue
            step += 1
            model.eval()
            with torch.no_grad():
                if step % 4 == 1:
                    with watch.asks_for_live():
                        watch.note_loss("live", loss_of(model, evaluated))
                if step % 2 == 0 and run.averaged:
                    with averaged_weights(watch.optimizer, model=model):
                        watch.note_loss("average", loss_of(model, evaluated))
            model.train()
            if step % run.every == 0 and run.saves and run.averaged:
                save(str(run.folder / str(step)))
                save_averaged(model, watch.optimizer, run.folder / f"{step}-averaged")
    return watch


def accelerator_of(run: Run) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    more = dict(run.more)
    if run.format:
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=run.reshard,
            state_dict_type=f"{run.format.upper()}_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap="LlamaDecoderLayer",
        )
    AcceleratorState._reset_state(True)  # of another run of this process
    return Accelerator(cpu=True, gradient_accumulation_steps=run.accumulate, **more)


def with_accelerate(run: Run) -> Watch:
    accelerator = accelerator_of(run)
    accelerator.scaler = run.scaler
    model = run.model()
    optimizer = run.build(model.parameters())
    watch = Watch(model, optimizer, run)
    model, wrapped, rows = accelerator.prepare(model, optimizer, loader_of(TOKENS[:24], 4 // run.ranks))
    if run.resume:
        accelerator.load_state(run.folder / str(run.resume))

    def step_on(tokens: torch.Tensor) -> bool:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens))
            if accelerator.sync_gradients:
                wrapped.step()
                wrapped.zero_grad()
        return bool(accelerator.sync_gradients)

    return loop(run, watch, model, rows, step_on, accelerator.save_state)


def with_torch(run: Run) -> Watch:
    if run.ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    network = run.model()
    model: nn.Module = network
    if run.format:
        shard(network, run, init_device_mesh("cpu", (run.ranks,)))
    elif run.ranks > 1:
        model = nn.parallel.DistributedDataParallel(network)
    optimizer = run.build(network.parameters())
    watch = Watch(network, optimizer, run)
    options = StateDictOptions(full_state_dict=run.format == "full", cpu_offload=True)

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))

    def save(path: str) -> None:
        saved = state()  # on all ranks
        if run.format != "full":
            dcp.save(saved, checkpoint_id=path)
        elif dist.get_rank() == 0:
            run.folder.mkdir(exist_ok=True)
            torch.save(saved, path)

    if run.resume:
        path = str(run.folder / str(run.resume))
        loaded = torch.load(path) if run.format == "full" else state()
        if run.format != "full":
            dcp.load(loaded, checkpoint_id=path)
        weights = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(model, optimizer, **weights, options=options)

    def step_on(tokens: torch.Tensor) -> bool:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        return True

    return loop(run, watch, model, loader_of(share(TOKENS[:24], run), 4 // run.ranks), step_on, save)


def saved_by_loop(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    return watch.live[step], load_file(folder / f"{step}-averaged" / "model.safetensors")

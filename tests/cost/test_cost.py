"""The cost model: bytes against real optimizers and models, seconds against records, and what follows."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline import PACE
from paceline.cli import main
from paceline.experiments import methods
from paceline.experiments.bench.subjects import MODELS, RIVALS, state_bytes
from paceline.experiments.config import ConfigError, Run
from paceline.experiments.cost import checks
from paceline.experiments.cost.communication import communication
from paceline.experiments.cost.estimate import checkpoint, cost, estimate
from paceline.experiments.cost.hardware import HARDWARE, hardware_of
from paceline.experiments.cost.memory import kept, layer_activations, local_elements, memory
from paceline.experiments.cost.optimizer import BLOCK, PRESETS, of_spec, preset
from paceline.experiments.cost.pictures import draw
from paceline.experiments.cost.shape import HUB, SHAPES, Tensor, named, of_gpt
from paceline.experiments.cost.speed import (
    MASKED,
    PASSES_EAGER,
    computing,
    micro_batch_seconds,
    optimizer_seconds,
)
from paceline.experiments.cost.training import Training
from paceline.experiments.evidence import studies
from paceline.experiments.evidence.estimates import estimates
from paceline.experiments.paper import lines
from paceline.experiments.paper.scales import PAPER
from paceline.lm.batch import Batch
from paceline.lm.evaluate import autocast, summed_loss
from paceline.lm.gpt import GPT, GPTShape
from paceline.lm.pretrained import Pretrained
from paceline.lm.throughput import operations_per_token
from paceline.optim import storage

ROOT = Path(__file__).parents[2]
H200 = HARDWARE["h200"]
STORAGES = ("int8", "bfloat16", "float32")
TINY = GPTShape(vocabulary=101, length=16, width=24, layers=2, heads=3)


def training(shape=None, optimizer="pace", **settings):
    of_optimizer = ("average_dtype", "update_every", "moments")
    own = {name: settings.pop(name) for name in of_optimizer if name in settings}
    made = preset(optimizer).with_settings(**own)
    return Training(**{"shape": shape or named("gpt2"), "hardware": H200, "optimizer": made, **settings})


def records():
    if not (ROOT / "records").is_dir():
        pytest.skip("records are not part of the package")
    return ROOT / "records"


def record(name):
    return json.loads((records() / name).read_text())


# --- Shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [("1b", 1.2358e9), ("8b", 8.0303e9), ("13b", 13.0159e9), ("70b", 70.5537e9), ("405b", 405.8534e9)],
)
def test_presets_have_the_parameters_of_the_models_they_are_named_after(name, known):
    assert SHAPES[name].parameters == pytest.approx(known, rel=1e-4)


def hub_model(name):
    """As transformers builds it, from its public config, without its weights."""
    import transformers as t

    common = {"tie_word_embeddings": True}
    made = {
        "HuggingFaceTB/SmolLM2-135M": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                          num_attention_heads=9, num_key_value_heads=3, **common)
        ),
        "HuggingFaceTB/SmolLM2-1.7B": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
                          num_attention_heads=32, num_key_value_heads=32, **common)
        ),
        "Qwen/Qwen3-1.7B": lambda: t.Qwen3ForCausalLM(
            t.Qwen3Config(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                          num_attention_heads=16, num_key_value_heads=8, head_dim=128, **common)
        ),
        "google/gemma-3-1b-pt": lambda: t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(vocab_size=262144, hidden_size=1152, intermediate_size=6912,
                               num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
                               head_dim=256, **common)
        ),
    }  # fmt: skip
    with torch.device("meta"):
        return made[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("google/gemma-3-1b-pt", 999_885_952),
    ],
)
def test_models_of_the_hub_have_the_tensors_that_transformers_builds(name, known):
    of_paper = {row.settings["model"] for row in PAPER.models.values() if "/" in row.settings["model"]}
    assert set(HUB) == {*of_paper, studies.GPU.tuning["model"]}
    own = named(name)
    real = sorted((p.shape[0], p.shape[1] if p.ndim > 1 else 1) for p in hub_model(name).parameters())
    assert sorted((t.rows, t.columns) for t in own.tensors() for _ in range(t.times)) == real
    assert own.parameters == known
    found = estimate(Run(task="sft", model=name, steps=10, length=512, fork="x@4", held_out_samples=3), H200)
    assert (found.steps, found.tokens) == (6, 6 * 16 * 512)
    assert found.cost.training.shape == replace(own, length=512)


@pytest.mark.parametrize("bias", [True, False])
def test_a_gpt_has_the_tensors_and_operations_of_the_real_one(bias):
    shape = replace(TINY, bias=bias)
    model = GPT(shape)
    own = of_gpt(shape)
    real = sorted((p.shape[0], p.shape[1] if p.ndim > 1 else 1) for p in model.parameters())
    assert sorted((t.rows, t.columns) for t in own.tensors() for _ in range(t.times)) == real
    assert own.parameters == shape.parameters
    assert own.operations_per_token == operations_per_token(model, 16)


def test_tensors_of_a_llama_are_those_that_the_benchmark_of_the_optimizer_steps():
    name = "llama:width=2048,layers=24,heads=16,keys=16,inner=8192,vocabulary=49152,tied=true"
    count = sum(torch.Size(shape).numel() for shape in MODELS["llama-1.7b"]())
    assert named(name).parameters == count
    untied = named(name.replace("true", "false"))
    assert untied.parameters - named(name).parameters == 49152 * 2048
    assert untied.operations_per_token == named(name).operations_per_token  # a look-up multiplies nothing


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("70B", "did you mean 70b"),
        ("gpt:9000m", "unknown model"),
        ("llama:width=64", "lacks layers, heads, keys, inner"),
        ("llama:width=64,layers=1,heads=2,keys=1,inner=8,depth=3", "no setting 'depth'"),
        ("llama:width=64,layers=1,heads=3,keys=1,inner=8", "do not fit"),
        ("llama:width=6.5,layers=1,heads=3,keys=1,inner=8", "allowed: a number"),
    ],
)
def test_shapes_that_there_are_not(name, said):
    with pytest.raises(ConfigError, match=said):
        named(name)


# --- Bytes, exactly -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "settings", "about"),
    [
        ("pace", {}, {}),
        ("pace", {"average_dtype": "bfloat16"}, {"average_dtype": "bfloat16"}),
        ("pace", {"average_dtype": "int8"}, {"average_dtype": "int8"}),
        ("pace_paper", {"gain": "paper"}, {}),
        ("pace_paper", {"gain": "paper", "average_dtype": "int8"}, {"average_dtype": "int8"}),
        ("pace_paper", {"gain": "paper", "betas": (0.0, 0.99)}, {"moments": 1}),
    ],
)
def test_state_of_pace_to_the_byte(dtype, name, settings, about):
    model = GPT(TINY).to(getattr(torch, dtype))
    optimizer = PACE(model.parameters(), **settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = kept(training(of_gpt(TINY), name, weights=dtype, **about))
    real = {
        key: sum(s[key].nbytes for s in optimizer.state.values())
        for key in next(iter(optimizer.state.values()))
    }
    assert state.host == real.pop("step")
    assert state.averages == sum(
        size for key, size in real.items() if key.startswith(("average", "returned"))
    )
    assert state.moments == sum(
        size for key, size in real.items() if not key.startswith(("average", "returned"))
    )
    assert state.weights == sum(p.nbytes for p in model.parameters())
    assert checkpoint(training(of_gpt(TINY), name, weights=dtype, **about)).whole == (
        state.weights + state_bytes(optimizer, "cpu")
    )


@pytest.mark.parametrize("averages", [(), ("power:0.7",), ("power:0.7", "half_life:0.1")])
@pytest.mark.parametrize(
    "spec",
    [
        "adamw",
        "pace",
        "pace:pullback_strength=0",
        "pace:pullback_strength=0,return_power=0.9",
        "pace:pullback_strength=0,ema_power=0.5,return_power=0.9",
        "pace:gain=paper",
        "pace:gain=paper,return_power=0.8",
        "pace:return_power=0.2",
        "pace:return_power=none,average_dtype=bfloat16",
        "pace:betas=(0.0, 0.99),average_dtype=int8,update_every=4",
        "ademamix",
        "lookahead",
        "gpa",
        "ema_nesterov",
        "schedule_free",
        "sgd",
        "sgd:momentum=0.9",
    ],
)
def test_state_of_every_optimizer_of_a_run(spec, averages):
    model = nn.Linear(100, 64, bias=False)
    optimizer = methods.make_optimizer(Run(steps=100, optimizer=spec, averages=averages), model)
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(lambda: 1.0)
    about = replace(of_spec(spec), passive=len(averages))
    real = state_bytes(optimizer, "cpu")
    expected = about.moment_bytes(6400, "float32") + about.average_bytes(6400)
    assert real - expected in range(40), "all but counts of steps"


def test_storages_are_those_of_the_library():
    assert storage.BLOCK == BLOCK
    for name, kind in storage.STORAGES.items():
        about = PRESETS["pace_paper"].with_settings(average_dtype=name)
        assert about.average_bytes(BLOCK) == kind.bytes * BLOCK
        assert (
            about.average_bytes(BLOCK + 1) - about.average_bytes(BLOCK)
            == kind.dtype.itemsize + (name == "int8") * 4
        )


def test_shards_are_whole_rows():
    assert local_elements(Tensor(8, 5, 1, True, True), 4) == 10
    assert local_elements(Tensor(9, 5, 1, True, True), 4) == 15
    assert local_elements(Tensor(9, 5, 1, True, True), 100) == 5
    many = kept(training(SHAPES["70b"], gpus=16384, sharding="fsdp"))
    even = 4 * SHAPES["70b"].parameters / 16384
    assert 1.7 * even < many.weights < 2 * even  # most matrices have fewer rows than there are GPUs
    split = training(SHAPES["70b"], gpus=16384, sharding="hsdp", group=256)
    assert kept(split).weights == pytest.approx(4 * SHAPES["70b"].parameters / 256, rel=0.01)


def test_real_shards_have_those_sizes():
    """torch's own rule for who gets what of a dimension."""
    from torch.distributed.tensor.placement_types import Shard

    for rows in (1, 7, 8, 9, 4096):
        for shards in (2, 8, 24):
            most = Shard.local_shard_size_and_offset(rows, shards, 0)[0]
            assert most * 3 == local_elements(Tensor(rows, 3, 1, True, True), shards)


# --- Activations --------------------------------------------------------------------------------------


def saved_bytes(model, tokens, targets, precision):
    """Bytes kept for backward, but for parameters."""
    kept_storages, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept_storages[memory.data_ptr()] = memory
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast(tokens.device, precision),
    ):
        loss = summed_loss(model, Batch(tokens, targets, None))
    assert loss.requires_grad
    return sum(memory.nbytes() for memory in kept_storages.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", [False, True])
def test_a_layer_keeps_the_bytes_that_are_predicted(precision, again):
    kept_bytes = []
    for layers in (2, 5):
        shape = GPTShape(vocabulary=64, length=32, width=48, layers=layers, heads=3)
        model = GPT(shape, activation_checkpointing=again)
        tokens, targets = torch.randint(64, (2, 4, 32))
        kept_bytes.append(saved_bytes(model, tokens, targets, getattr(torch, precision)))
    about = training(
        of_gpt(shape), precision=precision, compile=False, micro_batch=4, activation_checkpointing=again
    )
    each = about.stream * 48 * 128 if again else layer_activations(about) * 128
    # Copies of the weights that autocast makes are counted as temporaries.
    copies = 2 * 12 * 48**2 if precision == "bfloat16" and not again else 0
    assert (kept_bytes[1] - kept_bytes[0]) / 3 == pytest.approx(each + copies, rel=0.01)


def test_memory_of_gpt2_is_that_of_the_records():
    """Peaks of whole trainings on an H200, to the tenth of a GiB that was written down."""
    assert all(abs(error) < 0.02 for error in checks.of_peaks(records()).values())


# --- Seconds ------------------------------------------------------------------------------------------


class Moved(TorchDispatchMode):
    """Adds up the bytes of operands and results of whatever neither multiplies matrices nor attends."""

    total = 0

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        found = operation(*arguments, **(named or {}))
        name = operation.__name__
        free = (
            operation.is_view or operation.namespace != "aten" or name.startswith(("_unsafe_view", "empty"))
        )
        if not free and not name.startswith(("mm.", "addmm.", "_scaled_dot_product")):
            each = {
                id(t): t.nbytes for t in tree_leaves((arguments, named, found)) if isinstance(t, torch.Tensor)
            }
            self.total += sum(each.values())
        return found


def moved_bytes(model, batch, length):
    """Forward and backward, on tensors without content."""
    with FakeTensorMode(allow_non_fake_inputs=True), Moved() as moved:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        # With tensors without content transformers makes a mask in any case, as between packed examples.
        with torch.autocast("cpu", torch.bfloat16):
            loss = summed_loss(model, Batch(tokens, tokens, None))
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return moved.total


@pytest.mark.slow
@pytest.mark.parametrize("kind", PASSES_EAGER)
def test_passes_of_a_layer_that_is_not_compiled(kind):
    moved, batch, length = [], 16, 1024
    for layers in (1, 2):
        if kind == "gpt":
            shape = GPTShape(vocabulary=64, length=length, width=768, layers=layers, heads=12)
            model, about = GPT(shape), training(of_gpt(shape), compile=False)
        else:
            t = pytest.importorskip("transformers")
            about = training(replace(HUB["HuggingFaceTB/SmolLM2-135M"], length=length), compile=False)
            sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_key_value_heads": 3}
            config = t.LlamaConfig(vocab_size=64, num_hidden_layers=layers, num_attention_heads=9, **sizes)
            model = Pretrained(t.LlamaForCausalLM(config))
        moved.append(moved_bytes(model, batch, length))
    own = (moved[1] - moved[0]) / (batch * length)
    assert own / layer_activations(about) == pytest.approx(PASSES_EAGER[kind], rel=0.05)


def test_attention_with_a_mask_is_as_slow_as_the_record_says():
    found = record("2026-11-17-packed-h200.json")
    operations = 16 * 30 * 3 * 4 * 576 * 1024.0**2  # rows, layers, rounds, two products of whole squares
    assert operations / (H200.peak * found["attention_ms"] / 1e3) == pytest.approx(MASKED, abs=0.005)
    shape = replace(HUB["HuggingFaceTB/SmolLM2-135M"], length=1024)
    compiled = training(shape, micro_batch=16, packed=True)
    (ms,) = [row["ms"] for row in found["rows"] if row["what"] == "packed, compiled"]
    assert 1e3 * micro_batch_seconds(compiled) == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize("model", checks.MODELS)
@pytest.mark.parametrize("name", checks.OPTIMIZERS)
def test_seconds_of_a_step_of_the_optimizer_are_those_of_the_record(model, name):
    assert abs(checks.of_optimizers(records())[model, name]) < 0.09
    optimizer = checks.OPTIMIZERS[name]
    moved = optimizer.traffic("float32") + optimizer.beside("float32")
    extra = 4 if name == "AdamW, fused, and an EMA" else 0  # the weights are read once more
    assert moved == pytest.approx(RIVALS[name].traffic + extra, abs=1e-4)


def test_clipping_costs_what_the_record_says():
    rows = record("2026-11-18-step-h200.json")["rows"]
    for model, shape in checks.MODELS.items():
        row = next(r for r in rows if (r["model"], r["optimizer"]) == (model, "AdamW, fused, clipped"))
        assert 1e3 * optimizer_seconds(training(shape, "adamw")) == pytest.approx(row["ms"], rel=0.10)


def test_our_studies_took_what_was_estimated():
    """All runs of a kind together: each had its share of the GPU."""
    results = lines.read(sorted((ROOT / "records").glob("*evidence*.jsonl")))
    found = estimates(studies.GPU, results)
    # But for a rate that turned out to be of no use.
    assert sum(count for count, _, _ in found.values()) > 0.95 * len(results)
    for kind, (_, estimated, taken) in found.items():
        assert estimated == pytest.approx(taken, rel=0.25), kind


def test_the_share_of_the_optimizer_is_that_of_the_record():
    assert all(abs(error) < 0.05 for error in checks.of_whole_steps(records()).values())
    found = {row["what"]: row for row in record("2026-11-16-share-h200.json")["rows"]}
    for name in ("AdamW, fused", "PACE, fused, paper", "PACE, fused"):
        optimizer = checks.OPTIMIZERS[name]
        about = Training(shape=named("gpt2"), hardware=H200, optimizer=optimizer, micro_batch=16, clip=False)
        assert cost(about).optimizer_share == pytest.approx(found[name]["optimizer_share"], rel=0.15)


def test_speed_where_nothing_was_fitted():
    """GPT-2 in other batches, and a GPT of 7M with six at once, which is what the device can do."""
    assert all(abs(error) < 0.10 for error in checks.of_speeds(records()).values())
    small = checks.of_small(records())
    assert 0 < small[1] < 0.15 and 0 < small[6] < 0.30
    of_7m = training(named("gpt:7m", vocabulary=4096, length=256), micro_batch=64)
    deep = replace(of_7m, shape=replace(of_7m.shape, layers=8))
    assert micro_batch_seconds(deep) >= computing(of_7m).seconds


def test_errors_are_of_measured_numbers():
    """By hand: what was measured is in the denominator, and what is predicted too low is negative."""
    row = next(r for r in checks.rows_of(records(), checks.STEP) if r["optimizer"] == "PACE, fused")
    about = training(checks.MODELS["gpt2"], clip=False)
    by_hand = 1e3 * optimizer_seconds(about) / row["ms"] - 1
    assert row["model"] == "gpt2"
    assert checks.of_optimizers(records())["gpt2", "PACE, fused"] == pytest.approx(by_hand)
    assert checks.foretold(records(), "step_seconds")["gpt:25m", "AdamW"] == pytest.approx(
        0.0365992707 / 0.0327950705 - 1, rel=1e-6
    )
    assert checks.worst({1: -0.3, 2: 0.1}) == "30.0 % at most"


def test_small_models_reach_less_of_the_peak():
    reached = [
        cost(training(named(name), "adamw", micro_batch=batch)).mfu
        for name, batch in (("gpt:7m", 512), ("gpt2", 32), ("1b", 4), ("8b", 2))
    ]
    assert reached == sorted(reached) and reached[0] < 0.35 and 0.4 < reached[-1] < 0.65


# --- What follows -------------------------------------------------------------------------------------


def seventy(**settings):
    return training(
        SHAPES["70b"], **{"gpus": 256, "sharding": "fsdp", "activation_checkpointing": True, **settings}
    )


def test_more_of_anything_costs_more():
    for grow in (
        [seventy(micro_batch=n) for n in (1, 2, 4)],
        [seventy(gpus=n) for n in (2048, 512, 64, 8)],
        [seventy(optimizer="adamw"), *(seventy(average_dtype=dtype) for dtype in STORAGES)],
        [seventy(), seventy(activation_checkpointing=False)],
        [training(replace(shape, length=4096), gpus=8, sharding="fsdp") for shape in SHAPES.values()],
    ):  # fmt: skip
        sizes = [memory(each).total for each in grow]
        assert all(a < b for a, b in pairwise(sizes)), sizes
    for grow in (
        [seventy(update_every=n) for n in (100, 10, 2, 1)],
        [seventy(moments=1), seventy()],
        [seventy(optimizer="pace_paper"), seventy()],
        [seventy(average_dtype=dtype) for dtype in STORAGES],
        [seventy(), seventy(optimizer="ema", clip=True)],
        [seventy(clip=False), seventy()],
    ):
        times = [optimizer_seconds(each) for each in grow]
        assert all(a < b for a, b in pairwise(times)), times


def test_residuals_are_written_at_every_step_and_float32_averages_at_every_nth():
    for dtype, saves in (("float32", True), ("bfloat16", False), ("int8", False)):
        one, ten = (PRESETS["pace"].with_settings(average_dtype=dtype, update_every=n) for n in (1, 10))
        assert (one.traffic("float32") > ten.traffic("float32")) is saves
    far = PRESETS["pace"].with_settings(update_every=10**9)
    assert far.traffic("float32") == pytest.approx(28.0)


def test_limits():
    alone = training(gpus=1)
    assert communication(alone).seconds == 0
    assert communication(training(gpus=8)).reduced == 2 * 4 * named("gpt2").parameters * 7 / 8
    half = replace(alone, mfu=0.5)
    step = cost(half)
    assert step.compute_seconds == pytest.approx(step.operations / (0.5 * 989e12))
    assert cost(replace(half, mfu=1.0)).compute_seconds == pytest.approx(step.compute_seconds / 2)
    assert step.hours(1e9) == pytest.approx(1e9 / step.tokens_per_second / 3600)
    twice = cost(replace(alone, accumulate=2, micro_batch=8))
    assert twice.training.step_tokens == 2 * 8 * 1024
    whole = seventy(gpus=8)
    assert not cost(whole).fits and cost(seventy(gpus=1024)).fits


def test_pace_says_a_few_bytes_when_sharded_and_nothing_else():
    for sharding, said in (("ddp", 0), ("fsdp", 4 * 723), ("hsdp", 4 * 723)):
        names = ("pace", "pace_paper", "adamw")
        pace, paper, adamw = (communication(seventy(optimizer=name, sharding=sharding)) for name in names)
        assert (pace.of_pace, paper.of_pace, adamw.of_pace) == (said, 0, 0)
        assert pace.gathered == adamw.gathered and pace.scattered == adamw.scattered
        assert pace.seconds == adamw.seconds


def test_fsdp_gathers_twice_and_scatters_once_in_every_micro_batch():
    parameters = SHAPES["70b"].parameters
    spoken = communication(seventy(accumulate=3))
    assert spoken.gathered == pytest.approx(3 * 2 * 2 * parameters * 255 / 256)
    assert spoken.scattered == pytest.approx(3 * 4 * parameters * 255 / 256)
    assert spoken.reduced == 0
    groups = communication(seventy(sharding="hsdp"))
    assert groups.reduced == pytest.approx(2 * 4 * parameters / 8 * 31 / 32)
    assert groups.gathered == pytest.approx(2 * 2 * parameters * 7 / 8)


def test_communication_hides_behind_computing_as_far_as_it_is_said():
    fast = seventy(gpus=1024, overlap=0.0)
    spoken = communication(fast).seconds
    assert cost(fast).exposed_seconds == spoken
    assert cost(replace(fast, overlap=0.9)).exposed_seconds == 0
    slow = replace(fast, hardware=replace(H200, network=1e9), overlap=0.9)
    whole = cost(slow)
    assert whole.exposed_seconds == pytest.approx(communication(slow).seconds - 0.9 * whole.compute_seconds)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus": 12}, "whole nodes"),
        ({"gpus": 0}, "at least 1"),
        ({"gpus": 16, "sharding": "hsdp", "group": 3}, "what divides 16"),
        ({"group": 8}, "group is for hsdp"),
        ({"mfu": 1.5}, "above 0 and at most 1"),
        ({"overlap": 2.0}, "0 to 1"),
        ({"weights": "bfloat16", "precision": "float32"}, "allowed: bfloat16"),
        ({"update_every": 0}, "at least 1"),
        ({"optimizer": "adamw", "update_every": 2}, "settings of pace"),
        ({"optimizer": "adam"}, "did you mean adamw"),
    ],
)
def test_what_cannot_be_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        training(**settings)


def test_hardware_by_name():
    assert hardware_of("B200").bandwidth == 8e12
    with pytest.raises(ConfigError, match="did you mean h200"):
        hardware_of("h20")


# --- Runs ---------------------------------------------------------------------------------------------


def test_an_estimate_of_a_run_counts_as_the_run_does():
    from paceline.experiments.build import steps_of

    for budget in ({"steps": 7}, {"tokens": 10**6}, {"epochs": 2.0}, {"chinchilla": 0.5}):
        run = Run(model="gpt:1m", tokenizer="bpe:4096", batch_size=6, length=64, micro_batch_size=4, **budget)
        found = estimate(run, H200, samples=1000)
        assert found.steps == steps_of(run, 1000, found.cost.training.shape.parameters)
        assert found.tokens == found.steps * 6 * 64
        assert found.operations == found.tokens * found.cost.training.shape.operations_per_token
        assert found.seconds == found.training_seconds == found.steps * found.cost.step_seconds
        assert found.cost.training.accumulate == 2
        assert found.checkpoint == found.cost.checkpoint.whole


def test_an_estimate_has_the_parameters_and_state_of_the_run():
    run = Run(model="gpt:1m", length=64, steps=1, averages=("power:0.5",), held_out_samples=100)
    found = estimate(run, H200)
    shape = replace(
        GPTShape(vocabulary=2048, length=64, width=128, layers=3, heads=4), vocabulary_multiple=64
    )
    assert found.cost.training.shape.parameters == shape.parameters
    assert found.checkpoint == pytest.approx((4 + 16 + 4) * shape.parameters, rel=1e-3)
    assert found.evaluation_seconds > 0 and found.seconds > found.training_seconds
    more = estimate(replace(run, averages=(), held_out_samples=None), H200)
    assert more.evaluation_seconds == 0 and more.memory < found.memory


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "somebody/model"}, "give its shape"),
        ({"tokenizer": "somewhere/tokenizer"}, "give the model's shape"),
        ({"epochs": 1.0, "steps": None}, "number of samples"),
        ({"optimizer": "adamx"}, "did you mean adamw"),
    ],
)
def test_an_estimate_says_what_it_lacks(settings, said):
    run = Run(**{"steps": 5, **settings})
    with pytest.raises(ConfigError, match=said):
        estimate(run, H200)
    if "shape" in said and "model" in settings:
        assert estimate(run, H200, shape=SHAPES["1b"]).cost.training.shape.length == 128


# --- The command, and torch ---------------------------------------------------------------------------


def test_the_command_says_it_all(capsys):
    words = "cost --model 70b --gpus 1024 --hardware h200 --optimizer pace --average-dtype int8 --tokens 15T"
    assert main([*words.split(), "--activation-checkpointing"]) == 0
    said = capsys.readouterr().out
    for words in ("70.554B parameters, 1,024 × H200", "pace, int8", "averages", "checkpoint", "GPU-hours",
                  "15,000B tokens", "PACE refuses int8 averages of sharded"):  # fmt: skip
        assert words in said
    words = "cost --model gpt2 --gpus 1 --micro-batch 16 --optimizer adamw --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    whole = cost(training(optimizer="adamw", micro_batch=16))
    assert found["cost"]["memory"]["total"] == whole.memory.total
    assert found["cost"]["step_seconds"] == whole.step_seconds == found["adamw"]["step_seconds"]
    assert found["training"]["sharding"] == "ddp" and found["budget"] == 20 * 124475904


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model 71b", "model '71b' is unknown"),
        ("--hardware tpu", "there are: a100, h100, h200, b200"),
        ("--optimizer adamw --update-every 3", "adamw has no average_dtype, update_every"),
        ("--tokens many", "tokens is 'many'; allowed: a whole number"),
        ("--disk 0", "disk is 0.0; allowed: above 0"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert main(["cost", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_nothing_of_it_imports_torch():
    code = """
import sys
from paceline.cli import main
assert main("cost --model 8b --gpus 64".split()) == 0
from paceline.experiments.cost import estimate, tables
tables.TABLES["state"]()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    made = draw(tmp_path)
    assert [path.name for path in made] == ["cost-memory.png", "cost-time.png"]
    assert all(path.stat().st_size > 20_000 for path in made)


@pytest.mark.long
def test_the_benchmark_on_a_cpu(tmp_path, monkeypatch, capsys):
    script = ROOT / "benchmarks/cost.py"
    if not script.exists():
        pytest.skip("benchmarks are not part of the package")
    spec = importlib.util.spec_from_file_location("benchmark_of_costs", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "copy_bandwidth", lambda device, rounds: 1e10)  # which takes seconds
    flags = ["--device", "cpu", "--rounds", "1", "--only", "llama", "--record", str(tmp_path / "cost.json")]
    monkeypatch.setattr(sys, "argv", ["cost.py", *flags])
    module.main()
    found = json.loads((tmp_path / "cost.json").read_text())
    assert len(found["rows"]) == 3 and "failed" not in found
    assert found["worst"]["state"] < 1e-3  # but for counts of steps
    assert found["worst"]["peak"] < 0.05
    assert "largest errors: peak" in capsys.readouterr().out

"""Parameter groups: every parameter once, norms and biases without decay, names as the model's own."""

import math

import pytest
import torch
from problems import Tied, train
from torch import distributed, nn
from torch.optim import AdamW

from paceline import PACE, averaged_state_dict
from paceline.optim.groups import parameter_groups

pytestmark = pytest.mark.slow


def settings_of(groups):
    """Name → the settings of its group."""
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name, _ in group["params"]
    }


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def undecayed(model):
    return {
        name for name, own in settings_of(parameter_groups(model, 0.1)).items() if not own["weight_decay"]
    }


def assert_covers(groups, model):
    """Every parameter of the model, the tensor itself, exactly once, under its own name."""
    pairs = [pair for group in groups for pair in group["params"]]
    own = dict(model.named_parameters())
    assert len(pairs) == len(own) and dict(pairs).keys() == own.keys()
    assert all(parameter is own[name] for name, parameter in pairs)


# --- Language models as they come -----------------------------------------------------------------


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2))


def llama(tie=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config)


GPT2_LAYER = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
LLAMA_LAYER = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
]


def test_gpt2():
    model = gpt2()
    groups = parameter_groups(model, weight_decay=0.1)
    assert_covers(groups, model)
    layers = [f"transformer.h.{i}.{part}" for i in range(2) for part in GPT2_LAYER]
    decayed, plain = names(groups)
    assert decayed == ["transformer.wte.weight", "transformer.wpe.weight", *layers]  # lm_head is tied to wte
    assert all(name.endswith("bias") or ".ln_" in name for name in plain)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert not any("pullback_strength" in group for group in groups)


def test_gpt2_with_embeddings_left_alone():
    model = gpt2()
    groups = parameter_groups(model, weight_decay=0.1, pull_embeddings=False)
    assert_covers(groups, model)
    assert names(groups)[1] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert [group.get("pullback_strength") for group in groups] == [None, 0.0, None]


@pytest.mark.parametrize("tie", [False, True])
def test_llama(tie):
    model = llama(tie)
    groups = parameter_groups(model, weight_decay=0.1, pull_embeddings=False)
    assert_covers(groups, model)
    weights, unpulled, plain = names(groups)
    layers = [f"model.layers.{i}.{part}" for i in range(2) for part in LLAMA_LAYER]
    assert weights == layers + ([] if tie else ["lm_head.weight"])
    assert unpulled == ["model.embed_tokens.weight"]
    assert all(name.endswith("norm.weight") for name in plain) and len(plain) == 5


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("kind", [PACE, AdamW])
@pytest.mark.parametrize("pull_embeddings", [True, False])
def test_optimizers_train_with_it(build, kind, pull_embeddings):
    torch.manual_seed(0)
    model = build()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1, pull_embeddings=pull_embeddings)
    optimizer = kind(groups, lr=1e-2)
    tokens = torch.randint(40, (2, 12))
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert {name for group in optimizer.param_groups for name in group["param_names"]} == before.keys()


# --- What decays ----------------------------------------------------------------------------------


class ChannelNorm(nn.Module):
    """Of nobody's library; its weight has four dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3, 1, 1))


class FancyNorm2d(ChannelNorm):
    pass


class NormalizedLinear(nn.Module):
    """Named after norms, but its weight is a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


class Experts(nn.Module):
    """A bias per expert: two dimensions."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Parameter(torch.ones(2, 3, 3))
        self.gate_proj_bias = nn.Parameter(torch.ones(2, 3))


class Block(nn.Module):
    """A module that owns a norm, named as one, is not a norm for its other layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(3), nn.Linear(3, 3)


Block.__name__ = "PreNorm"

DECAY = [
    (nn.Linear(3, 3), {"bias"}),
    (nn.Conv2d(3, 3, 1), {"bias"}),
    (nn.Embedding(3, 3), set()),
    (nn.EmbeddingBag(3, 3), set()),
    (nn.LayerNorm(3), {"weight", "bias"}),
    (nn.LayerNorm((2, 3)), {"weight", "bias"}),
    (nn.RMSNorm((2, 3)), {"weight"}),
    (nn.GroupNorm(1, 3), {"weight", "bias"}),
    (nn.BatchNorm1d(3), {"weight", "bias"}),
    (nn.SyncBatchNorm(3), {"weight", "bias"}),
    (nn.InstanceNorm2d(3, affine=True), {"weight", "bias"}),
    (nn.PReLU(), {"weight"}),
    (nn.GRU(3, 3), {"bias_ih_l0", "bias_hh_l0"}),
    (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"},
    ),
    (ChannelNorm(), {"scale"}),
    (FancyNorm2d(), {"scale"}),
    (NormalizedLinear(), set()),
    (Experts(), {"gate_proj_bias"}),
    (Block(), {"norm.weight", "norm.bias", "layer.bias"}),
]


@pytest.mark.parametrize("model, expected", DECAY, ids=lambda value: type(value).__name__)
def test_fewer_than_two_dimensions_norms_and_biases_do_not_decay(model, expected):
    assert undecayed(model) == expected
    assert_covers(parameter_groups(model, 0.1), model)


def test_without_a_weight_decay_the_optimizers_own_holds():
    model = nn.Linear(3, 3)
    assert "weight_decay" not in parameter_groups(model)[0]
    for kind in (PACE, AdamW):
        optimizer = kind(parameter_groups(model), weight_decay=0.7)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.0]


def test_decay_moves_what_decays_and_nothing_else():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = PACE(parameter_groups(model, weight_decay=0.5), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert shrunk == [True, False, False, False]


def test_unpulled_embeddings_move_as_without_a_pull():
    def trained(**settings):
        torch.manual_seed(0)
        model = Tied()
        groups = parameter_groups(model, 0.1, pull_embeddings=False)
        train(model, PACE(groups, lr=1e-2, **settings), steps=1)
        return model

    strong, none = trained(gain="uniform", pullback_strength=9.0), trained(pullback_strength=0.0)
    assert torch.equal(strong.embed.weight, none.embed.weight)


# --- Tied, frozen, wrapped ------------------------------------------------------------------------


def test_tied_parameters_appear_once_under_their_first_name_and_count_as_embeddings():
    class OutputFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.embed = nn.Linear(4, 7, bias=False), nn.Embedding(7, 4)
            self.embed.weight = self.out.weight

    model = OutputFirst()
    (group,) = parameter_groups(model, 0.1, pull_embeddings=False)
    assert names([group]) == [["out.weight"]] and group["pullback_strength"] == 0.0


def test_frozen_parameters_are_kept_cost_nothing_and_train_once_thawed():
    torch.manual_seed(0)
    model = Tied()
    groups = parameter_groups(model, weight_decay=0.1)
    assert_covers(groups, model)
    optimizer = PACE(groups, lr=1e-2)
    frozen = model.frozen.weight.detach().clone()
    train(model, optimizer, steps=2)
    assert model.frozen.weight not in optimizer.state and torch.equal(model.frozen.weight, frozen)
    model.frozen.requires_grad_(True)
    train(model, optimizer, steps=2)
    assert optimizer.state[model.frozen.weight]["step"] == 2 and not torch.equal(model.frozen.weight, frozen)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        lambda model: torch.compile(nn.DataParallel(torch.compile(model, backend="eager")), backend="eager"),
    ],
    ids=["compile", "DataParallel", "both"],
)
def test_wrappers_leave_no_trace_in_the_names(wrap):
    model = Tied()
    plain, wrapped = parameter_groups(model, 0.1), parameter_groups(wrap(model), 0.1)
    assert names(wrapped) == names(plain)
    assert_covers(wrapped, model)


def test_distributed_data_parallel_leaves_no_trace_in_the_names(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = Tied()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = parameter_groups(nn.parallel.DistributedDataParallel(model), 0.1)
    finally:
        distributed.destroy_process_group()
    assert names(wrapped) == names(parameter_groups(model, 0.1))


def test_a_compiled_layer_leaves_no_trace_and_a_layer_called_module_keeps_its_name():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.norm = torch.compile(ChannelNorm(), backend="eager")

    groups = parameter_groups(Outer(), 0.1)
    assert names(groups) == [["module.weight"], ["module.bias", "norm.scale"]]


def test_names_are_those_of_the_exported_average():
    model = torch.compile(Tied(), backend="eager")
    optimizer = PACE(parameter_groups(model, 0.1))
    exported = averaged_state_dict(model, optimizer)
    assert all(name in exported for group in optimizer.param_groups for name in group["param_names"])


def test_order_is_the_models_and_the_same_every_time():
    first, again = (parameter_groups(gpt2(), 0.1, pull_embeddings=False) for _ in range(2))
    assert names(first) == names(again)
    order = [name for name, _ in gpt2().named_parameters()]
    for group in names(first):
        assert group == sorted(group, key=order.index)


def test_empty_groups_are_left_out():
    assert names(parameter_groups(nn.LayerNorm(3), 0.1, pull_embeddings=False)) == [["weight", "bias"]]
    assert names(parameter_groups(nn.Linear(3, 3, bias=False), 0.1, pull_embeddings=False)) == [["weight"]]
    assert parameter_groups(nn.ReLU(), 0.1) == []


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True])
def test_a_wrong_weight_decay_is_refused(value):
    with pytest.raises(ValueError) as refusal:
        parameter_groups(nn.Linear(2, 2), value)
    expected = f"Invalid weight_decay value: {value!r}; allowed: None, or >= 0 and finite"
    assert str(refusal.value) == expected


@pytest.mark.parametrize("value", [None, 0, 0.0, "no"])
def test_a_wrong_switch_is_refused(value):
    with pytest.raises(ValueError, match=r"Invalid pull_embeddings value: .*; allowed: True or False"):
        parameter_groups(nn.Linear(2, 2), pull_embeddings=value)


def test_parameters_in_place_of_the_model_are_refused():
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, .* got <generator"):
        parameter_groups(nn.Linear(2, 2).parameters())


def test_parameters_without_a_shape_are_refused():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet; run the model once"):
        parameter_groups(model)
    model(torch.ones(1, 3))
    assert len(parameter_groups(model)) == 2

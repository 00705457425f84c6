"""Parameter groups: every parameter once, norms and biases without decay, names as the model's own."""

import math

import pytest
import torch
from problems import Tied, train
from torch import nn
from torch.optim import AdamW

from paceline import PACE, averaged_state_dict
from paceline.groups import parameter_groups


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


class ChannelNorm(nn.Module):
    """A norm of nobody's library; its weight has four dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3, 1, 1))


class FancyNorm2d(ChannelNorm):
    pass


class NormalizedLinear(nn.Module):
    """A layer named after norms, whose weight is a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


class Experts(nn.Module):
    """A bias per expert: two dimensions."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.unbiased = nn.Parameter(torch.ones(2, 3, 3)), nn.Parameter(torch.ones(2, 3))
        self.gate_proj_bias = nn.Parameter(torch.ones(2, 3))


class PreNorm(nn.Module):
    """A module named as a norm, whose layers are none."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(3), nn.Linear(3, 3)


PLAIN = [
    (nn.Linear(3, 3), {"bias"}),
    (nn.Conv2d(3, 3, 1), {"bias"}),
    (nn.Embedding(3, 3), set()),
    (nn.LayerNorm((2, 3)), {"weight", "bias"}),
    (nn.RMSNorm((2, 3)), {"weight"}),
    (nn.GroupNorm(1, 3), {"weight", "bias"}),
    (nn.SyncBatchNorm(3), {"weight", "bias"}),
    (nn.InstanceNorm2d(3, affine=True), {"weight", "bias"}),
    (nn.PReLU(), {"weight"}),
    (nn.GRU(3, 3), {"bias_ih_l0", "bias_hh_l0"}),
    (nn.MultiheadAttention(4, 2, add_bias_kv=True), {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}),
    (ChannelNorm(), {"scale"}),
    (FancyNorm2d(), {"scale"}),
    (NormalizedLinear(), set()),
    (Experts(), {"gate_proj_bias"}),
    (PreNorm(), {"norm.weight", "norm.bias", "layer.bias"}),
]


@pytest.mark.parametrize(("model", "expected"), PLAIN, ids=lambda value: type(value).__name__)
def test_fewer_than_two_dimensions_norms_and_biases_do_not_decay(model, expected):
    groups = parameter_groups(model, 0.1)
    settings = {name: group["weight_decay"] for group in groups for name, _ in group["params"]}
    assert {name for name, decay in settings.items() if decay == 0.0} == expected
    assert set(settings.values()) <= {0.0, 0.1}
    pairs, own = [pair for group in groups for pair in group["params"]], dict(model.named_parameters())
    assert len(pairs) == len(own) and all(parameter is own[name] for name, parameter in pairs)


@pytest.mark.parametrize("kind", [PACE, AdamW])
def test_without_a_weight_decay_the_optimizers_own_holds(kind):
    optimizer = kind(parameter_groups(nn.Linear(3, 3)), weight_decay=0.7)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.0]


def test_tied_parameters_are_there_once_and_frozen_ones_train_when_thawed():
    torch.manual_seed(0)
    model = Tied()
    groups = parameter_groups(model, weight_decay=0.1)
    assert names(groups) == [["embed.weight", "frozen.weight"], ["norm.weight", "norm.bias", "frozen.bias"]]
    optimizer, frozen = PACE(groups, lr=1e-2), model.frozen.weight.detach().clone()
    train(model, optimizer, steps=2)
    assert model.frozen.weight not in optimizer.state and torch.equal(model.frozen.weight, frozen)
    model.frozen.requires_grad_(True)
    train(model, optimizer, steps=2)
    assert not torch.equal(model.frozen.weight, frozen)


WRAPPERS = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(
        nn.DataParallel(torch.compile(model, backend="eager")), backend="eager"
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_leave_no_trace_in_names_which_are_those_of_an_export(wrapper):
    model = Tied()
    wrapped = WRAPPERS[wrapper](model)
    groups = parameter_groups(wrapped, 0.1)
    assert names(groups) == names(parameter_groups(model, 0.1))
    optimizer = PACE(groups)
    exported = averaged_state_dict(wrapped, optimizer)
    assert all(name in exported for group in optimizer.param_groups for name in group["param_names"])


def test_a_layer_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert names(parameter_groups(model, 0.1)) == [["module.weight"], ["module.bias"]]


def test_empty_groups_are_left_out():
    assert names(parameter_groups(nn.LayerNorm(3), 0.1)) == [["weight", "bias"]]
    assert names(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == [["weight"]]
    assert parameter_groups(nn.ReLU(), 0.1) == []


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True])
def test_a_wrong_weight_decay_is_refused(value):
    with pytest.raises(ValueError) as refusal:
        parameter_groups(nn.Linear(2, 2), value)
    expected = f"Invalid weight_decay value: {value!r}; allowed: None, or >= 0 and finite"
    assert str(refusal.value) == expected


def test_what_is_no_model_or_has_no_shapes_yet_is_refused():
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, .* got <generator"):
        parameter_groups(nn.Linear(2, 2).parameters())
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet; run the model once"):
        parameter_groups(model)

"""The golden trajectories of the paper's algorithm, on every path."""

import pytest
import torch
from reference import distance
from trajectories import CONTROLS, DATA, META, NOT_OFFERED, OFFERED, adamw_of

from paceline import PACE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, in the interpreter


def test_all_cases_are_accounted_for():
    assert len(META) == 44 and NOT_OFFERED.keys() <= META.keys()
    assert [case for case in META if case not in {*OFFERED, *NOT_OFFERED}] == ["offset10_gain2"]


def check(case, dtype, tolerance, device="cpu", **path):
    count = META[case]["tensors"]
    starts = [torch.tensor(DATA[f"{case}/p0/{j}"], dtype=dtype, device=device) for j in range(count)]
    parameters = [start.requires_grad_() for start in starts]
    optimizer = PACE(parameters, control=CONTROLS[case], **adamw_of(case), **path)
    for i, lr in enumerate(DATA[f"{case}/lrs"]):
        optimizer.param_groups[0]["lr"] = float(lr)
        for j, parameter in enumerate(parameters):
            gradient = torch.tensor(DATA[f"{case}/g/{j}"][i])
            parameter.grad = None if gradient.isnan().all() else gradient.to(parameter)
        optimizer.step()
        for j, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            average = state.get("average", parameter)
            found = {"p": parameter, "ema": average, "ret": state.get("returned", average)}
            for key, tensor in found.items():
                assert distance(tensor, DATA[f"{case}/{key}/{j}"][i]) <= tolerance, (key, j, i)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("case", OFFERED)
def test_trajectory(case, foreach):
    check(case, torch.float64, 1e-12, foreach=foreach)


SHORT = ("default", "none_grads", "return_power_uf3")
"""Cases for the kernel in every run of the tests; test_rule.py takes each of its branches, too."""
KERNEL = [
    pytest.param(case, marks=[] if case in SHORT else pytest.mark.long)
    for case in OFFERED
    if case != "unclipped"  # grows beyond float32
]


@pytest.mark.parametrize("case", KERNEL)
def test_trajectory_of_the_kernel(case, kernel):
    check(case, torch.float32, 2e-6, kernel, fused=True)

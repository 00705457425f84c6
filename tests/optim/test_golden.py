"""The golden trajectories: float64 values of an independent transcription of the paper."""

import numpy as np
import pytest
import torch
from problems import PATHS
from trajectories import DATA, META, NOT_OFFERED, OFFERED, settings

from paceline import PACE

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]


def test_all_cases_are_accounted_for():
    assert len(META) == 44
    assert len(NOT_OFFERED) == 9
    assert NOT_OFFERED.keys() <= META.keys()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", OFFERED)
def test_trajectory(case, dtype, foreach):
    if case == "unclipped" and dtype == torch.float32:
        pytest.skip("grows beyond float32")
    count = META[case]["tensors"]
    parameters = [torch.tensor(DATA[f"{case}/p0/{j}"], dtype=dtype).requires_grad_() for j in range(count)]
    optimizer = PACE(parameters, foreach=foreach, **settings(META[case]))
    for i, lr in enumerate(DATA[f"{case}/lrs"]):
        optimizer.param_groups[0]["lr"] = float(lr)
        for j, parameter in enumerate(parameters):
            gradient = DATA[f"{case}/g/{j}"][i]
            parameter.grad = None if np.isnan(gradient).all() else torch.tensor(gradient, dtype=dtype)
        optimizer.step()
        for j, parameter in enumerate(parameters):
            state = optimizer.state[parameter]
            ours = {"p": parameter, "ema": state["average"], "ret": state.get("returned", state["average"])}
            for key, tensor in ours.items():
                golden = DATA[f"{case}/{key}/{j}"][i]
                error = np.abs(tensor.detach().double().numpy() - golden).max()
                assert error <= TOLERANCE[dtype] * np.abs(golden).max(), (key, j, i, error)

"""PyTorch's own optimizer tests, with PACE and an attached AdamW in place of torch's optimizers.

They are no part of the installed torch: take `test/test_optim.py`, with the folder `optim` next to it, from a
checkout of a release near the installed one.

    python tests/optim/torch_suite.py CHECKOUT/test/test_optim.py [--record FILE]
"""

import argparse
import importlib
import importlib.util
import json
import sys
import types
import unittest
from datetime import date
from pathlib import Path

import torch

import paceline
from paceline import Control

CONTROLS = {
    "usual paper": {},
    "paper": {"control": Control.paper(30.0, return_power=0.8)},
    "push": {"control": Control.push()},
    "pull": {"control": Control.pull(every=2, gap="after", order="average, then pull")},
    "none": {"control": Control.none()},
}
STORAGES = {
    "push in bfloat16": {"control": Control.push(), "average_dtype": "bfloat16"},
    "pull in int8": {"control": Control.pull(), "average_dtype": "int8"},
}
USUAL = {"lr": 1e-2, "weight_decay": 0.0}
REFUSED = {
    "Invalid betas value": {"betas": (1.0, 0.0)},
    "Invalid weight_decay value: -1": {"weight_decay": -1},
    "Invalid lr value: -1": {"lr": -1},
}
LEFT_OUT = {"test_defaults_changed_to_foreach": "looks for a function called _multi_tensor_adamw"}


class Attached(torch.optim.AdamW):
    """AdamW as torch has it, which keeps two averages and is pushed."""

    def __init__(self, params, *, control=Control.push(), average_dtype="float32", **settings):  # noqa: B008
        super().__init__(params, **settings)
        paceline.attach(self, control=control, average_dtype=average_dtype)


def inputs(common, kind):
    """Return a function that lists torch's settings of AdamW, each control and each storage."""

    def make(device, dtype=None):
        found = []
        for each in common.optim_inputs_func_adamw(device, dtype):
            each.kwargs.setdefault("weight_decay", 0.0)  # without a gradient nothing may move
            if kind is Attached or not any(each.kwargs.get(name) for name in ("amsgrad", "capturable")):
                found.append(each)
        usual = USUAL | ({"eps": 0.1} if dtype == torch.float16 else {})  # as torch has it
        own = {**CONTROLS, **({} if dtype == torch.float64 else STORAGES)}
        for name, settings in own.items():
            control = settings.get("control", Control.paper())
            if kind is paceline.PACE or control.sizing == "uniform":
                found.append(common.OptimizerInput(None, {**usual, **settings}, desc=name))
        return found

    return make


def errors(common, of_torch, own):
    """Return a function that lists what torch refuses, and of what is refused in words of our own."""

    def make(device, dtype):
        found = of_torch(device, dtype)
        for each in found:
            if each.error_regex == "Tensor lr must be 1-element" and own:
                each.error_regex = "Invalid lr value: .*1-element Tensor"
            if each.error_type is UserWarning:  # of a parameter that is given twice
                each.error_type, each.error_regex = ValueError, "parameter 0 .* parameter 1 .* share memory"
        for words, settings in own.items():
            given = common.OptimizerInput(None, settings, words)
            found.append(common.ErrorOptimizerInput(given, error_type=ValueError, error_regex=words))
        return found

    return make


def infos(common):
    """Return the rows of torch's table of optimizers."""
    adamw = next(info for info in common.optim_db if info.optim_cls is torch.optim.AdamW)
    shared = {
        "supports_complex": False,
        "not_og_supported_flags": ("foreach", "maximize"),
        "decorators": adamw.decorators,
    }
    pace = common.OptimizerInfo(
        paceline.PACE,
        optim_inputs_func=inputs(common, paceline.PACE),
        optim_error_inputs_func=errors(common, common.get_error_inputs_for_all_optims, REFUSED),
        supported_impls=("foreach",),
        **shared,
    )
    attached = common.OptimizerInfo(
        Attached,
        optim_inputs_func=inputs(common, Attached),
        optim_error_inputs_func=errors(common, adamw.optim_error_inputs_func, {}),
        supported_impls=("foreach", "fused"),
        supports_fused_on=("cpu", "cuda"),
        has_capturable_arg=True,
        **shared,
    )
    return [pace, attached]


def tracker(common):
    """Return torch's comparison of states, for states with names that have no value."""
    nothing = torch.empty(0)

    class Tracker(common.TensorTracker):
        def add(self, tensor):
            super().add(nothing if tensor is None else tensor)

        def pop_check_set(self, tensor, *others, **settings):
            super().pop_check_set(nothing if tensor is None else tensor, *others, **settings)

    return Tracker


def load(file):
    """Return the tests of a file for the CPU, made for our optimizers alone."""
    if importlib.util.find_spec("expecttest") is None:  # torch's TestCase inherits from it, and that is all
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
    # Not above: it changes settings of torch for the whole process, also of one that collects doctests.
    common = importlib.import_module("torch.testing._internal.common_optimizers")
    common.optim_db[:] = infos(common)  # before the file is imported, which reads both
    common.TensorTracker = tracker(common)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("test_optim_of_torch", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(module.TestOptimRenewedCPU)
    return unittest.TestSuite(test for test in tests if not any(name in test.id() for name in LEFT_OUT))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="test/test_optim.py of PyTorch")
    parser.add_argument("--record", type=Path, help="where to write the counts as JSON")
    options = parser.parse_args()
    result = unittest.TextTestRunner().run(load(options.file.resolve()))
    name = lambda test: test.id().split(".")[-1]  # noqa: E731
    failed = [name(test) for test, _ in (*result.failures, *result.errors)]
    found = {
        "date": date.today().isoformat(),
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "passed": result.testsRun - len(failed) - len(result.skipped),
        "failed": failed,
        "skipped": {name(test): reason for test, reason in result.skipped},
        "left out": LEFT_OUT,
    }
    print(json.dumps(found, indent=1))
    if options.record:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""In what order tests run, JAX by itself, and Triton's interpreter where there is no GPU."""

import os
import re

import torch

if not torch.cuda.is_available():
    # Triton asks for it when it is imported, by whichever test is the first to do so.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A process of its own each, or several: the last of them would be waited for by all other workers.
LONGEST = (
    "test_killed_runs_end_as_undisturbed_ones",
    "test_two_ranks",
    "test_any_sequence_of_operations_agrees_with_the_reference",
    "test_runs_that_prepare_the_same_data_at_once_wait_for_each_other",
    "test_example",
    "test_the_site",
)

ALL_SLOW = re.compile(r"^pytestmark = .*mark\.(slow|long)\b", re.MULTILINE)


def pytest_collection_modifyitems(items):
    """The longest first; all others as they are."""
    items.sort(key=lambda item: item.name.partition("[")[0] not in LONGEST)


def pytest_ignore_collect(collection_path, config):
    """Tests with JAX run where they are asked for by name, as `make test` does after all others: a process
    that has imported JAX must not fork, and workers that read samples are forked.

    Files of slow tests only are not even imported by `make check`, which has no use for them."""
    if collection_path.name == "test_optax.py":
        return True if not any("test_optax" in argument for argument in config.args) else None
    fast = "not slow" in config.option.markexpr and collection_path.suffix == ".py"
    return True if fast and ALL_SLOW.search(collection_path.read_text()) else None

"""The sweep spaces of the paper's tables and captions: learning rates η, strengths c, powers κ, periods uf.

A comment says where the paper leaves a value open and what is taken here.
"""

SEED = 42

# --- Fine-tuning, 1B to 2B ------------------------------------------------------------------------------

LARGE = ("smollm2-1.7b", "qwen3-1.7b", "gemma3-1b")
LARGE_RATES = {
    "smollm2-1.7b": (3e-4, 7e-4, 1e-3),
    "qwen3-1.7b": (3e-4, 5e-4),
    "gemma3-1b": (1e-3, 5e-3),
}
LARGE_STRENGTHS = (1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
LARGE_POWERS = (0.2, 0.5, 0.7)
HEADLINE = {"smollm2-1.7b": 1e-3, "qwen3-1.7b": 5e-4, "gemma3-1b": 1e-3}
HEADLINE_SEEDS = (42, 1337, 2024)
# Open: c and κ of the runs with three seeds. Taken: the c that is printed for SmolLM2-135M, with the κ of
# this table that is next to the one printed there.
HEADLINE_STRENGTH, HEADLINE_POWER = 1e-1, 0.2
CLIPPED_RATES = (3e-4, 1e-3)
CLIPPED_STRENGTHS = (5e-3, 1.5e-2, 5e-2, 1.5e-1, 5e-1)

TULU_RATES = (3e-4, 5e-4)
TULU_STRENGTHS = (5e-2, 1e-1, 1.5e-1, 2.5e-1)

# --- Fine-tuning, 135M ----------------------------------------------------------------------------------

SMALL_RATES = (1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3)
SMALL_STRENGTHS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # and 0, which is the EMA
SMALL_POWERS = (0.3, 0.5, 0.7)
SMALL_PERIODS = (1, 5, 10)
GRID_POWER = 0.3
# Of the comparison with Schedule-Free. Open: c and κ of PACE there. Taken: those of the dense sweep, uf = 1.
RIVAL_RATES = (1e-3, 5e-3)
FREE_RATES = (1e-3, 3e-3, 5e-3, 1e-2)
QWEN_FREE_RATES = (3e-4, 1e-3)
BRANCH_RATES = (3e-3, 5e-3)
BRANCH_STRENGTH, BRANCH_POWER = 1e-1, 0.3

# --- Pretraining ----------------------------------------------------------------------------------------

GPT_RATES = (3e-4, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 1e-2)
# Open: the points of "coarse 1e-4 to 3e-1 plus local 1e-3 to 1e-2". Taken: the bins of fine-tuning, and the
# local points that are printed for the schedules.
GPT_STRENGTHS = (1e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 1e-1, 3e-1)
GPT_POWERS = (0.2, 0.5, 0.7)
GPT_POWER = 0.5  # of fig:pretrain
SCHEDULED_RATE = 2e-3
SCHEDULED_STRENGTHS = (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2)
SCHEDULED_POWERS = (0.1, 0.2, 0.3, 0.5)
SCHEDULED_SEEDS = (0, 1, 42)
RIVER_STRENGTH = 2e-3  # PACE at a constant rate
RIVER_DECAYED_STRENGTH = 3e-3  # PACE with WSD
RIVER_POWER = 0.5

# --- All ------------------------------------------------------------------------------------------------

SCHEDULES = ("constant", "cosine", "wsd")

POWERS_BESIDE: dict[str, tuple[float, ...]] = {
    "smollm2-135m": SMALL_POWERS,
    "smollm2-135m-long": SMALL_POWERS,
    **dict.fromkeys(LARGE, LARGE_POWERS),
    "qwen3-1.7b-tulu": LARGE_POWERS,
    "gpt2-124m": (0.1, 0.2, 0.3, 0.5, 0.7),
}
"""κ of the averages kept beside AdamW: every EMA that a figure of that model asks for, from one run."""
PERIODS_BESIDE: dict[str, tuple[int, ...]] = {"smollm2-135m": SMALL_PERIODS}
"""uf of them, where it is not 1 alone."""

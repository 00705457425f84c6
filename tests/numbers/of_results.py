"""Numbers of docs/results.md that are in sentences, and what README says of them."""

from functools import cache
from statistics import fmean

from said import RECORDS, Numbers

from paceline.experiments.evidence import studies
from paceline.experiments.evidence.claims import AVERAGE, EMA, LIVE, LONG, OURS, SCHEDULE_FREE, TIE, Claim
from paceline.experiments.evidence.studies import GPU, loss_of
from paceline.experiments.evidence.tables import Row, mean_of, rows_of
from paceline.experiments.paper import lines
from paceline.experiments.report.verdict import errors_of


@cache
def everything():
    """Results of all runs, by their names."""
    return lines.read(sorted(RECORDS.glob("*evidence*.jsonl")))


@cache
def rows() -> list[Row]:
    """The basin of pretraining."""
    results = everything()
    return rows_of(studies.basin(GPU, results), results)


def over(ours, theirs, times=None):
    """A difference of losses, each at its best rate or both at a multiple of AdamW's."""
    return mean_over(ours, theirs, times).loss


def mean_over(ours, theirs, times=None):
    """The same with its error."""
    return Claim(ours=ours, theirs=theirs, times=times).difference(rows())


def at(side, lr):
    """The mean loss of three seeds."""
    return fmean(side.row(rows()).losses[lr, seed] for seed in (1, 2, 3))


ADAMWS_EMA = studies.PLAIN, "power_0_7"
EMAS = [f"power_0_{digit}" for digit in (3, 5, 6, 7, 8)]


def is_settled(mean):
    """Whether its 95 % interval leaves out 0."""
    return abs(mean.loss) > errors_of(mean.count) * mean.error


def shorter_over(lr, setting=None, view="power_0_7", seeds=(1, 2, 3, 4, 5, 6), than=ADAMWS_EMA):
    """A harder pull toward a shorter average over AdamW's EMA, both with κ = 0.7; mean, error and seeds."""
    results = everything()
    apart = []
    for seed in seeds:
        ends = [
            loss_of(studies.trial("gpt", GPU.pretraining, one, lr, seed=seed), results, own)[0]
            for one, own in ((setting or studies._pace(1e-2, 0.3), view), than)
        ]
        apart.append(ends[0] - ends[1])
    return mean_of(apart)


def branches_end_early(setting, view):
    """Losses at a constant rate and of the branch, at each of its ends."""
    results = everything()
    lr, whole = studies.SWEPT_RATES[0], GPU.pretraining["steps"]
    constant = dict(results[studies.trial("gpt", GPU.pretraining, setting, lr).name].curve(view))
    ends = {
        steps: studies.trial("gpt", GPU.pretraining, setting, lr, "wsd", steps=steps)
        for steps in (whole // 2, whole * 3 // 4, whole)
    }
    return [(constant[steps], loss_of(one, results, view)[0]) for steps, one in ends.items()]


def with_a_larger_batch(setting, lr, view, seed=1):
    """Where a run with four times the batch ended."""
    one = studies.trial("gpt", GPU.pretraining, setting, lr, seed=seed, batch=studies.BATCHES[0])
    return loss_of(one, everything(), view)[0]


def larger_batches_over(setting, lr, view="average"):
    """Four times the batch, over the EMA of AdamW that is best there by the first seed; all three seeds."""
    best = min(EMAS, key=lambda view: with_a_larger_batch(studies.PLAIN, lr, view))
    return [
        with_a_larger_batch(setting, lr, view, seed) - with_a_larger_batch(studies.PLAIN, lr, best, seed)
        for seed in (1, 2, 3)
    ]


def of_the_largest_batch():
    """The least loss of any weights, and the least from 0.004 on."""
    results = everything()
    ends = [
        (one.lr, min(loss_of(one, results, view)[0] for view in one.views))
        for one in studies.batch(GPU)
        if one.batch == 16 and one.name in results
    ]
    return min(loss for _, loss in ends), min(loss for lr, loss in ends if lr >= 0.004)


def twice_from_one_seed():
    """How far apart a run ended that two files have."""
    first, second = (lines.read([RECORDS / f"2026-11-{day}-evidence-gpt.jsonl"]) for day in (16, 17))
    (name,) = first.keys() & second.keys()
    ends = [one[name].evaluations[-1][1]["average"] for one in (first, second)]
    return abs(ends[0] - ends[1])


def variants_over_same():
    """How far a gap that looks ahead and rarer updates end from the same without, at the lower rate."""
    results = everything()
    ends = {
        one.setting: loss_of(one, results, "average")[0]
        for one in studies.strength(GPU)
        if one.method == studies.PACE and one.lr == studies.SWEPT_RATES[0]
    }
    far = {setting: abs(end - ends[", ".join(setting.split(", ")[:2])]) for setting, end in ends.items()}
    return max(apart for setting, apart in far.items() if not setting.startswith("c 0.1,"))


def at_the_higher_rate(every, seed=1):
    """Where PACE ends whose averages are updated at so many steps, at three times the lower rate."""
    results = everything()
    setting = studies._pace(3e-3, 0.5, every)
    one = studies.trial("gpt", GPU.pretraining, setting, studies.SWEPT_RATES[1], seed=seed)
    return loss_of(one, results, "average")[0]


@cache
def gpt2():
    """Its runs at a constant rate, of the first seed, by their methods."""
    results = everything()
    trials = [one for one in studies.gpt2(GPU) if (one.schedule, one.seed) == ("constant", studies.SEED)]
    return {one.method: results[one.name] for one in trials}


def gpt2_over(view, other, step=-1):
    """PACE of the paper over AdamW's weights, after so many evaluations."""
    ours, theirs = (gpt2()[method].evaluations[step][1] for method in (studies.PACE, studies.ADAMW))
    return ours[view] - theirs[other]


@cache
def fine() -> list[Row]:
    """The basin of fine-tuning."""
    results = everything()
    return rows_of(studies.fine_tuning_basin(GPU, results), results)


def fine_over(ours, times=None):
    """Of AdamW's best EMA, each at its best rate or both at a multiple of AdamW's."""
    return Claim(ours=ours, theirs=EMA, times=times).difference(fine())


def fine_over_best(ours, lr):
    """Over the best of AdamW's EMAs at the same rate, by seed 1."""
    own = {seed: loss for (rate, seed), loss in ours.row(fine()).losses.items() if rate == lr}
    return _over_best_ema(own, lr)


def _over_best_ema(own, lr):
    theirs = adamw_in_fine_tuning(lr, min(EMAS, key=lambda view: adamw_in_fine_tuning(lr, view)[1]))
    return mean_of([loss - theirs[seed] for seed, loss in sorted(own.items())])


def doubled_in_fine_tuning(lr):
    """The default pulled twice as hard: over the default, and over AdamW's best EMA there."""
    twice, once = (
        {
            seed: loss_of(studies.trial("sft", GPU.tuning, setting, lr, seed=seed), everything(), "average")[
                0
            ]
            for seed in (1, 2, 3)
        }
        for setting in (studies._DOUBLE, studies._DEFAULT)
    )
    return mean_of([twice[seed] - once[seed] for seed in twice]), _over_best_ema(twice, lr)


def fine_at(side, lr):
    """The mean loss of the seeds that there are."""
    return side.row(fine()).mean(lr).loss


def adamw_in_fine_tuning(lr, view):
    """By seed, the setting that was chosen."""
    results = everything()
    setting = studies.chosen(studies.fine_tuning(GPU), studies.FINE_SETTINGS, results)[0]
    trials = {seed: studies.trial("sft", GPU.tuning, setting, lr, seed=seed) for seed in (1, 2, 3)}
    return {seed: loss_of(one, results, view)[0] for seed, one in trials.items()}


def pulled_in_fine_tuning(c, kappa, lr, view):
    """Of the first seed."""
    results = everything()
    return loss_of(studies.trial("sft", GPU.tuning, studies._pace(c, kappa), lr), results, view)[0]


def results_page():
    theirs = gpt2()[studies.ADAMW].evaluations[-1][1]
    returned = gpt2()[studies.DEFAULT].evaluations[-1][1]["average"]
    assert min(theirs, key=theirs.get) == "power_0_6"
    assert abs(returned - theirs["power_0_7"]) < 0.001
    tokens, epoch = 1200 * 128 * 1024, 87_942_610  # enwiki has so many
    seeds = [at_the_higher_rate(1, seed) for seed in (1, 2, 3)]
    assert abs(at_the_higher_rate(10) - seeds[0]) < 0.003
    mild, default = studies._pace(1e-3, 0.5), (studies._DEFAULT, "average")
    pulls = [studies._pace(c, 0.5) for c in (1e-3, 3e-3, 1e-2)]
    assert min(pulls, key=lambda one: with_a_larger_batch(one, 4e-3, "average")) == mild
    assert all(
        with_a_larger_batch(studies.PLAIN, 8e-3, "power_0_5")
        <= with_a_larger_batch(studies.PLAIN, 8e-3, view)
        for view in EMAS
    )
    near, far = ([larger_batches_over(one, lr) for one in (mild, studies._DEFAULT)] for lr in (4e-3, 8e-3))
    beside = [mean_of(larger_batches_over(one, 4e-3, "power_0_6")) for one in (mild, studies._DEFAULT)]
    assert min(near[0] + near[1]) > 0 and sorted(apart > 0 for apart in far[0]) == [False, False, True]
    near, far = ([mean_of(apart) for apart in one] for one in (near, far))
    assert [is_settled(one) for one in near + far] == [False, False, False, True]
    largest = of_the_largest_batch()
    theirs_there = mean_of(
        [with_a_larger_batch(studies.PLAIN, 4e-3, "power_0_6", seed) for seed in (1, 2, 3)]
    )
    assert not is_settled(mean_over(LONG, EMA)) and not any(
        is_settled(mean_over(OURS, EMA, n)) for n in (2, 3)
    )
    assert all(is_settled(mean_over(AVERAGE, EMA, times)) for times in (None, 2, 3))
    both = [mean_over(OURS, EMA, times) for times in (2, 3)]
    at_best = [fine_at(side, 3e-4) for side in (EMA, AVERAGE, LONG, OURS)]
    assert min(mean.loss for row in fine() if (mean := row.mean(9e-4))) == fine_at(LONG, 9e-4)
    assert LONG.row(fine()).view == "power_0_8" and EMA.row(fine()).view == "power_0_7"
    assert LONG.row(fine()).best_rate == 9e-4 and EMA.row(fine()).best_rate == 3e-4
    longer = [fmean(adamw_in_fine_tuning(lr, "power_0_8").values()) for lr in (9e-4, 3e-3)]
    quarter = (fine_at(EMA, 9e-4) - longer[0]) / (fine_at(EMA, 9e-4) - fine_at(LONG, 9e-4))
    assert 0.2 < quarter < 0.3
    others = [shorter_over(lr, seeds=(2, 3, 4, 5, 6)) for lr in (6e-3, 9e-3)]
    assert [is_settled(one) for one in others] == [False, True]
    rates = (2e-3, 3e-3, 6e-3, 9e-3)
    doubled = [shorter_over(lr, studies._DOUBLE, "average", (1, 2, 3)) for lr in rates]
    assert [is_settled(one) for one in doubled] == [False, False, False, True]
    tuned = [doubled_in_fine_tuning(lr) for lr in (3e-4, 9e-4, 3e-3)]
    assert [is_settled(over) and over.loss < -TIE for over, _ in tuned] == [False, False, True]
    assert all(over.loss <= 0 for over, _ in tuned) and tuned[0][0].loss > -0.001
    more = [shorter_over(lr, studies._DOUBLE, "average", (1, 2, 3), than=default) for lr in rates]
    assert [is_settled(one) for one in more] == [False, False, False, True]
    assert [max(abs(one.loss), one.error) <= TIE for one in more] == [True, True, False, False]
    ends_early = [(studies.PLAIN, "live"), (studies.PAPER, "average"), default, ADAMWS_EMA]
    decayed = [branches_end_early(*one) for one in ends_early]
    by = [[constant - end for constant, end in ends] for ends in decayed]
    above = [
        [constant - lowest for (constant, _), (_, lowest) in zip(ends, decayed[0], strict=True)]
        for ends in decayed
    ]
    return [
        "by {:.3f}, {:.3f} and {:.3f} after 2,000, 3,000 and 4,000 steps".format(*by[0]),
        "what PACE returns by {:.3f}, {:.3f} and {:.3f}".format(*by[1]),
        "what the default returns by {:.3f}, {:.3f} and {:.3f}".format(*by[2]),
        "what the default returns is {:.3f}, {:.3f} and {:.3f} above AdamW decayed".format(*above[2]),
        "(κ = 0.7) is {:.3f}, {:.3f} and {:.3f} above it".format(*above[3]),
        "and what PACE returns {:.3f}, {:.3f} and {:.3f}:".format(*above[1]),
        "{:+}, {:+}, {:+} and {:+} nats".format(*map(shorter_over, (2e-3, 3e-3, 6e-3, 9e-3))),
        "its means are {:+}, {:+}, {:+} and {:+} from it at the same rates".format(*doubled),
        f"AdamW's best EMA at its best rate ({near[0]:+}, {near[1]:+})",
        f"{-far[1]} below it, PACE's not shown to be",
        f"AdamW's best EMA is {theirs_there} at 0.004",
        f"return there is {near[0]:+} and {near[1]:+} from it",
        f"kept beside them {beside[0]:+} and {beside[1]:+})",
        f"the default is {far[1]:+} from it, just more than three seeds",
        f"PACE is {far[0]:+} from it: two seeds are below",
        "within 0.001 of the default at the best rate",
        f"and {tuned[1][0]:+} and {tuned[2][0]:+} from it at three and ten times that rate",
        "at these rates it is {:+}, {:+} and {:+}.".format(*(over for _, over in tuned)),
        f"ends at {largest[0]:.1f} at best, and from 0.004 on above {largest[1] - 0.05:.1f}",
        f"every 5 steps end {at_the_higher_rate(5) - seeds[0]:.3f} above those of every step",
        f"of every step are {max(seeds) - min(seeds):.3f} apart",
        f"ends within {variants_over_same():.3f} of the same without them",
        f"ends {gpt2_over('average', 'live'):.3f} above AdamW's last weights",
        f"and {gpt2_over('average', 'power_0_6'):.3f} above AdamW's best EMA",
        f"after 400 steps it was {gpt2_over('average', 'live', 1):.3f} above",
        f"after 800 it was {gpt2_over('average', 'live', 3):.3f}.",
        f"ends, {returned - theirs['power_0_6']:.3f} above the EMA that turned out best (κ = 0.6)",
        f"{tokens / 1e6:.0f}M tokens of Wikipedia in all",
        f"({tokens / epoch:.1f} epochs)",
        f"{-mean_over(AVERAGE, LIVE)} below the one and {mean_over(AVERAGE, EMA)} above the other",
        f"it is {mean_over(LONG, EMA):+} from the EMA",
        f"at the best rate** ({mean_over(OURS, EMA):+})",
        f"{at(EMA, 3e-2):.3f} for the EMA, {at(AVERAGE, 3e-2):.3f} for PACE,",
        f"{at(OURS, 3e-2):.3f} for our default",
        f"ended {twice_from_one_seed():.3f} apart",
        f"more than {TIE:g};",
        f"({errors_of(3)} errors of three seeds",
        f"it is {mean_over(AVERAGE, EMA, 2)} and {mean_over(AVERAGE, EMA, 3)} above that EMA",
        f"no difference is shown ({both[0]:+}, {both[1]:+})",
        "setting it is {:+} and {:+} at the".format(*others),
        "65.5M tokens",
        "on conversations, 300 steps of 16 × 1,024 tokens.",
        "from a file of 4-bit weights (GGUF's Q4_1) that are trained in float32",
        f"{-fine_over_best(LONG, 9e-4)} and {-fine_over_best(LONG, 3e-3)} below the best of AdamW's five",
        f"they tie ({fine_over(LONG):+}), and at AdamW's best rate it is {fine_over_best(LONG, 3e-4)} above",
        f"default ends {fine_over_best(OURS, 3e-4):+} and {fine_over_best(OURS, 9e-4):+} from the best of",
        f"and {-fine_over_best(OURS, 3e-3)} below it at ten times it",
        f"all end within {max(at_best) - min(at_best):.3f} of one another",
        f"({pulled_in_fine_tuning(1e-2, 0.7, 3e-4, 'average'):.3f}, one seed)",
        f"At 0.0009 PACE returned with κ = 0.8 ends at {fine_at(LONG, 9e-4):.3f}, the lowest",
        f"ends at {fine_at(EMA, 9e-4):.3f} with κ = 0.7, which was best at 0.0003,",
        f"and at {longer[0]:.3f} with κ = 0.8, its best there",
        f"At 0.003 PACE returned with κ = 0.8 ends at {fine_at(LONG, 3e-3):.3f}, Schedule-Free at "
        f"{fine_at(SCHEDULE_FREE, 3e-3):.3f}, the default at {fine_at(OURS, 3e-3):.3f}, AdamW's EMA at "
        f"{fine_at(EMA, 3e-3):.3f} with κ = 0.7 and at {longer[1]:.3f} with κ = 0.8.",
        f"{errors_of(6)} of six)",
    ]


def readme():
    wide = [f"{mean_over(OURS, EMA, times):+}" for times in (None, 2, 3)]
    theirs = min(gpt2()[studies.ADAMW].evaluations[-1][1].values())
    returned = gpt2()[studies.DEFAULT].evaluations[-1][1]["average"]
    return [
        f"{gpt2_over('average', 'power_0_6'):.3f} above AdamW's best EMA and",
        f"what the default returns {returned - theirs:.3f} above it",
        f"({wide[0]} nats from it), is not shown to differ",
        f"at two and three times that rate ({wide[1]} and {wide[2]})",
        f"(three seeds) ends at {at(OURS, 3e-2):.2f} where that EMA ends at {at(EMA, 3e-2):.2f}",
        f"{over(AVERAGE, EMA):.3f} above that EMA",
        f"{shorter_over(6e-3):+} and {shorter_over(9e-3):+} from it at two and three times that rate",
        f"is {fine_over_best(LONG, 3e-4):+} from AdamW's best EMA at AdamW's best rate, and "
        f"{fine_over_best(LONG, 9e-4):+} and {fine_over_best(LONG, 3e-3):+} from the best of five EMAs",
        "the default is {:+}, {:+} and {:+} from it".format(
            *(fine_over_best(OURS, lr) for lr in (3e-4, 9e-4, 3e-3))
        ),
    ]


def choose_page():
    hard, soft = (
        [pulled_in_fine_tuning(c, 0.5, lr, "power_0_8") for lr in (3e-4, 9e-4)] for c in (3e-2, 3e-3)
    )
    theirs = [min(adamw_in_fine_tuning(lr, f"power_0_{digit}")[1] for digit in (7, 8)) for lr in (3e-4, 9e-4)]
    return [
        f"it ended at {hard[0]:.3f} in place of {soft[0]:.3f} at the best rate, and at {hard[1]:.3f} in "
        f"place of {soft[1]:.3f} at three times it (one seed; AdamW's best EMA: {theirs[0]:.3f} and "
        f"{theirs[1]:.3f})",
    ]


RESULTS = Numbers(
    measured={"README.md": readme, "docs/results.md": results_page, "docs/choose.md": choose_page},
    fixed={
        "README.md": ["torch 2.10", "power 0.2", "power 0.7", "power 0.5", "Apache-2.0"],
        "docs/distributed.md": ["waits 30 seconds for its ranks", "given up after 10 minutes"],
        "docs/results.md": [
            "from 0.006 on",
            "from it at 0.002, 0.003, 0.006 and 0.009",
            "from 0.002 on with three seeds",
            "at 0.002, 0.003, 0.006 and 0.009 at a constant rate, and at 0.002 and 0.003 with WSD",
            "at a rate of 0.002, one seed.",
            "at 0.002 and 0.003, lower at 0.009 and not settled at 0.006",
            "c = 0.001 (the best of three at 0.004, by seed 1)",
            "at 0.004 and 0.008 of the smaller one",
            "At 0.008 AdamW's best EMA is κ = 0.5",
            "(c = 0.03, κ = 0.5, returned",
            "gain with c = 0.03 does",
            "1,000 and 250 steps",
            "c = 0.01",
            "(c = 0.03, κ = 0.5, returned with κ = 0.8;",
            "were also done at 0.003,",
            "At 0.0003, the best rate",
            "c = 0.01 with κ = 0.7",
            "κ = 0.3",
            "κ = 0.7",
            "2.5B",
            "its 95 % interval",
            "0.3, 0.5, 0.6, 0.7 and 0.8",
        ],
    },
)

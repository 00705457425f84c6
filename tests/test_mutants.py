"""The mutants follow the source: a change that loses one is noticed at once, not in the long run."""

from collections import Counter
from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline" / "optim"
SEVERAL = ("rule", "foreach", "state", "pace", "averaging", "loading", "weights", "wrapper", "pullback")


def test_each_applies_in_one_place_compiles_and_is_like_no_other():
    texts = {file: (SOURCE / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    seen, wrong = {}, []
    for mutant in MUTANTS:
        try:
            broken = mutant.applied_to(texts[mutant.file])
            if mutant.file.endswith(".py"):
                compile(broken, mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
            continue
        if broken == texts[mutant.file]:
            wrong.append(f"{mutant.name} changes nothing")
        other = seen.setdefault((mutant.file, broken), mutant.name)
        if other != mutant.name:
            wrong.append(f"{mutant.name} is {other}")
    assert not wrong, "\n".join(wrong)


def test_names_are_unique():
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_there_are_enough_and_everywhere():
    assert len(MUTANTS) >= 60
    counts = Counter(mutant.file for mutant in MUTANTS)
    assert [file for file in SEVERAL if counts[f"{file}.py"] < 5] == []


def test_the_killers_are_there():
    """By name; whether there are such parameters, in brackets, the run itself finds out."""
    assert all(mutant.killers for mutant in MUTANTS)
    missing = []
    for killer in {killer for mutant in MUTANTS for killer in mutant.killers}:
        file, _, test = killer.partition("::")
        text = (ROOT / file).read_text() if (ROOT / file).exists() else None
        if text is None or (test and f"def {test.partition('[')[0]}(" not in text):
            missing.append(killer)
    assert missing == []

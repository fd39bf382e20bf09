"""`cputrain tune` on the demo against an exhaustive sweep over the same candidates.

    python benchmarks/tune_against_sweep.py --report               # one tune, about 25 minutes
    python benchmarks/tune_against_sweep.py --tunes 10 --report    # a tune for each repetition: about 50 minutes

The sweep measures every candidate `--rounds` times, in rounds, each time as many steps as a trial of tune. Its best and
the winner of tune are then measured again in turns: winner, best, best, winner. The target: in 8 of 10 such repetitions
the winner reaches 0.97 of the best's speed, and tune takes a quarter of the sweep's time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from machine import description, facts_table, report_path, table

from cputrain import hardware
from cputrain.launch.config import Config
from cputrain.tune import candidates, trial
from cputrain.tune.candidates import Candidate
from cputrain.tune.search import Rounds
from cputrain.tune.session import Plan, Session
from cputrain.tune.trial import Training
from cputrain.tune.tried import Tried

SCRIPT = Path(__file__).parent / "demo_with_trainer.py"
RATIO, REPETITIONS, OF, SHARE = 0.97, 8, 10, 0.25
LONGER = 4


def tuned(
    training: Training, tried: list[Candidate], budget: float, steps: int | None
) -> tuple[Candidate, Plan, float]:
    """The winner, what was searched, and how long it took, the first trial included."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        session = Session(training, Config(), Tried(Path(folder, "tried"), {}), budget, say, lambda _: None, steps)
        plan = session.plan(tried)
        verdict = session.search(plan)
        took = time.monotonic() - began
    say(f"tune: {plan.candidates[verdict.winner].words} after {took:.0f} s: {verdict.why}")
    return plan.candidates[verdict.winner], plan, took


def seconds(training: Training, candidate: Candidate, steps: int) -> float:
    found = trial.run(training, candidate.config(Config()), steps)
    if found.seconds is None:
        raise RuntimeError(f"{candidate.words}: {found.problem}")
    return found.seconds


def swept(training: Training, plan: Plan, rounds: int) -> tuple[Candidate, Rounds, float]:
    """The best of a sweep, its measurements, and how long it took."""
    found, chance = Rounds(), random.Random(1)
    everyone = range(len(plan.candidates))
    began = time.monotonic()
    for number in range(rounds):
        order = chance.sample(everyone, len(everyone))
        found.add({one: seconds(training, plan.candidates[one], plan.steps) for one in order})
        say(f"sweep: round {number + 1} of {rounds}, {time.monotonic() - began:.0f} s")
    return plan.candidates[found.best(everyone)], found, time.monotonic() - began


def again(training: Training, winner: Candidate, best: Candidate, steps: int) -> float:
    """The winner's speed as a share of the best's, by longer runs than a trial's."""
    times = [seconds(training, one, LONGER * steps) for one in (winner, best, best, winner)]
    return (times[1] + times[2]) / (times[0] + times[3])


def say(text: str) -> None:
    print(text, flush=True)


def sweep_rows(plan: Plan, found: Rounds, best: Candidate, winners: Sequence[Candidate]) -> list[dict[str, str]]:
    place = plan.candidates.index(best)
    return [
        {
            "candidate": one.words,
            "times the best's seconds, median": f"{math.exp(found.slower(number, place)):.3f}",
            "won": str(winners.count(one)) if one in winners else "",
        }
        for number, one in enumerate(plan.candidates)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=600.0, help="of each tune, in seconds (default 600)")
    parser.add_argument("--rounds", type=int, default=8, help="of the sweep (default 8)")
    parser.add_argument("--repetitions", type=int, default=OF)
    parser.add_argument("--tunes", type=int, default=1, help="how many; repetitions take their winners in turn")
    parser.add_argument("--dtypes", default="fp32,int16")
    parser.add_argument("--steps", type=int, help="of a trial; default: what the budget allows")
    parser.add_argument("--most", type=int, help="only so many candidates, to see that all of it runs")
    parser.add_argument("--report", action="store_true", help="write a report into benchmarks/results")
    asked = parser.parse_args()
    training = Training((str(SCRIPT), "--output_dir", "demo", "--per_device_train_batch_size", "32", "--use_cpu"))
    every = candidates.candidates(hardware.this_machine(), asked.dtypes.split(","), candidates.allocators())[
        : asked.most
    ]
    about = description()
    tunes = [tuned(training, every, asked.budget, asked.steps) for _ in range(asked.tunes)]
    winners, plan = [winner for winner, _, _ in tunes], tunes[0][1]
    took = statistics.mean(took for _, _, took in tunes)
    best, found, sweep_took = swept(training, plan, asked.rounds)
    say(f"sweep: {best.words} after {sweep_took:.0f} s")
    ratios = [again(training, winners[one % asked.tunes], best, plan.steps) for one in range(asked.repetitions)]
    reached = sum(ratio >= RATIO for ratio in ratios)
    share = took / sweep_took
    is_reached = reached * OF >= REPETITIONS * len(ratios) and share <= SHARE
    verdict = "reached" if is_reached else "**missed**"
    lines = [
        f"- The winner's speed as a share of the best's, in {len(ratios)} repetitions: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}; at least {RATIO} in **{reached}** of them, "
        f"median **{statistics.median(ratios):.3f}**.",
        f"- Time: tune {took:.0f} s (mean of {asked.tunes}), the sweep {sweep_took:.0f} s: **{share:.2f}** of it.",
        f"- Target ({RATIO} in {REPETITIONS} of {OF}, {SHARE} of the time): {verdict}.",
    ]
    rows = sweep_rows(plan, found, best, winners)
    settings = {"steps of a trial": str(plan.steps), "rounds of the sweep": str(asked.rounds)}
    say("\n".join(["", table(rows), "", *lines]))
    if asked.report:
        head = f"# `cputrain tune` against an exhaustive sweep\n\n{facts_table(about | settings)}"
        report_path("tune").write_text("\n".join([head, "", table(rows), "", *lines, ""]))
    sys.exit(not is_reached)


if __name__ == "__main__":
    main()

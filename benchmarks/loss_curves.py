"""Does cputrain learn as stock does? The demo's training with several seeds, both sides; a report and a picture.

    python benchmarks/loss_curves.py --report

The losses are those over real positions (stock's own includes padded ones). The dropout masks of the two sides differ,
so that curves can't be equal: in every window of steps the sides' means over the seeds must differ by no more than
the seeds of one side do among themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from interleaved import Side, environment
from machine import description, facts_table, report_path, table

SCRIPT = Path(__file__).parent.parent / "examples" / "demo" / "training_side.py"
STEPS_PER_TURN = 5  # as in training_side.py
NAMES = ("stock", "cputrain")
Curves = dict[str, list[list[float]]]  # for each side, for each seed, the loss of each step

COLOURS = {"stock": "#d95f02", "cputrain": "#1b6ca8"}
WIDTH, HEIGHT, MARGIN = 720, 400, 50


def train(seeds: list[int], steps: int, threads: int, dtype: str) -> Curves:
    """All sides and seeds at once, because nothing is timed here."""
    environments = {name: environment("native", threads, ours=name == "cputrain") for name in NAMES}
    environments["cputrain"]["CPUTRAIN_DTYPE"] = dtype
    shared = {"steps": steps, "threads": threads, "questions": 1}
    sides = [Side(name, str(SCRIPT), shared | {"seed": seed}, environments[name]) for name in NAMES for seed in seeds]
    curves: Curves = {name: [[] for _ in seeds] for name in NAMES}
    try:
        for turn in range(steps // STEPS_PER_TURN):
            for side in sides:
                side.send("turn", number=turn)
            for index, side in enumerate(sides):
                curves[side.name][index % len(seeds)] += side.receive()["losses"]
            print(f"\r{(turn + 1) * STEPS_PER_TURN} of {steps} steps", end="", file=sys.stderr)
    finally:
        for side in sides:
            side.close()
    return curves


def windows(curve: list[float], width: int) -> list[float]:
    return [statistics.mean(curve[first : first + width]) for first in range(0, len(curve), width)]


def compare(curves: Curves, width: int) -> list[dict[str, float]]:
    """For each window: the mean of each side, how far they are apart, and how far one side's seeds are."""
    smooth = {name: [windows(curve, width) for curve in curves[name]] for name in NAMES}
    rows = []
    for number in range(len(smooth["stock"][0])):
        stock, ours = ([curve[number] for curve in smooth[name]] for name in NAMES)
        means = statistics.mean(stock), statistics.mean(ours)
        rows.append(
            {
                "step": min((number + 1) * width, len(curves["stock"][0])),
                "stock": means[0],
                "cputrain": means[1],
                "apart": abs(means[0] - means[1]),
                "spread": max(max(values) - min(values) for values in (stock, ours)),
            }
        )
    return rows


def picture(curves: Curves, width: int) -> str:
    """An SVG with one line per side and seed."""
    smooth = {name: [windows(curve, width) for curve in curves[name]] for name in NAMES}
    top = max(value for side in smooth.values() for curve in side for value in curve)
    count = len(smooth["stock"][0])

    def place(index: float, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * index / max(count - 1, 1)
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * loss / top:.1f}"

    lines = [
        f'<polyline fill="none" stroke="{COLOURS[name]}" stroke-width="1.6" '
        f'points="{" ".join(place(index, loss) for index, loss in enumerate(curve))}"/>'
        for name in NAMES
        for curve in smooth[name]
    ]
    texts = [(MARGIN, HEIGHT - 30, "0"), (WIDTH - MARGIN - 20, HEIGHT - 30, str(len(curves["stock"][0])))]
    texts += [(WIDTH // 2 - 20, HEIGHT - 14, "steps"), (8, MARGIN, f"{top:.1f}"), (8, HEIGHT - MARGIN, "0")]
    texts += [(MARGIN, 24, f"Loss over real positions, mean of {width} steps, one line per seed")]
    axes = f"M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}"
    labels = [f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in texts]
    labels += [
        f'<text x="{WIDTH - 150}" y="{MARGIN + 20 * row}" fill="{COLOURS[name]}">{name}</text>'
        for row, name in enumerate(NAMES)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/><path d="{axes}" fill="none" stroke="black"/>'
        + "".join(lines + labels)
        + "</svg>\n"
    )


def report(rows: list[dict[str, float]], arguments: argparse.Namespace, image: str) -> str:
    inside = sum(row["apart"] <= row["spread"] for row in rows)
    shown = [
        {
            "up to step": str(row["step"]),
            "stock": f"{row['stock']:.3f}",
            "cputrain": f"{row['cputrain']:.3f}",
            "apart": f"{row['apart']:.3f}",
            "spread of the seeds": f"{row['spread']:.3f}",
            "within": "yes" if row["apart"] <= row["spread"] else "**no**",
        }
        for row in rows
    ]
    settings = {
        "seeds": " ".join(map(str, arguments.seeds)),
        "steps": str(arguments.steps),
        "threads": str(arguments.threads),
        "dtype of optimize": arguments.dtype,
    }
    return (
        f"# Loss curves of the demo's training: stock and cputrain in {arguments.dtype}\n\n"
        f"    python benchmarks/loss_curves.py {' '.join(sys.argv[1:])}\n\n"
        f"Mean loss over real positions of each {arguments.window} steps, mean over the seeds. *Apart*: the\n"
        "difference of the two means; *spread*: largest less smallest seed of one side, the larger of the two sides.\n"
        f"{inside} of {len(rows)} windows lie within the spread.\n\n![loss curves]({image})\n\n"
        + table(shown)
        + "\n"
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--window", type=int, default=25, help="steps that are averaged (default 25)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each of the processes (default 1)")
    parser.add_argument("--dtype", default="fp32", help="of cputrain's side (default fp32); stock is fp32")
    parser.add_argument("--json", action="store_true", help="print the curves as JSON instead of the report")
    parser.add_argument("--report", action="store_true", help="also write report and picture into benchmarks/results")
    arguments = parser.parse_args()
    if len(arguments.seeds) < 2:
        parser.error("one seed has no spread; give at least two --seeds")
    if arguments.steps < STEPS_PER_TURN or arguments.steps % STEPS_PER_TURN:
        parser.error(f"--steps is {arguments.steps}; choose a multiple of {STEPS_PER_TURN}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    curves = train(arguments.seeds, arguments.steps, arguments.threads, arguments.dtype)
    name = "loss_curves" if arguments.dtype == "fp32" else f"loss_curves_{arguments.dtype}"
    path, image = report_path(name), report_path(name, ".svg")
    text = report(compare(curves, arguments.window), arguments, image.name)
    print(json.dumps(curves) if arguments.json else text)
    if arguments.report:
        path.write_text(text)
        image.write_text(picture(curves, arguments.window))
        print(f"wrote {path} and {image}", file=sys.stderr)


if __name__ == "__main__":
    main()

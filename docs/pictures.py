"""Makes the pages' pictures of real output: a report of a training of the demo, and what doctor says. Needs chromium.

python docs/pictures.py
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"
CPUTRAIN = [sys.executable, "-m", "cputrain"]
TRAINING = "--output_dir run --per_device_train_batch_size 32 --max_steps 120 --use_cpu --save_strategy no"
TERMINAL = "font: 13px/1.35 monospace; color: #ddd; background: #16181d; padding: 16px; margin: 0; white-space: pre"


def photographed(page: Path, picture: Path, width: int, height: int) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent}/profile", f"--window-size={width},{height}", f"--screenshot={picture}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = ROOT / "benchmarks" / "demo_with_trainer.py"
        subprocess.run([*CPUTRAIN, "run", str(script), *TRAINING.split()], cwd=folder, check=True)
        subprocess.run([*CPUTRAIN, "report", "run"], cwd=folder, check=True)
        photographed(folder / "run" / "_cputrain" / "report.html", PICTURES / "report.png", 1440, 1000)
        environ = {**os.environ, "COLUMNS": "110"}
        said = subprocess.run([*CPUTRAIN, "doctor"], env=environ, capture_output=True, text=True, check=True).stdout
        page = folder / "doctor.html"
        page.write_text(
            '<meta charset="utf-8"><body style="margin: 0; background: #16181d">'
            f'<pre style="{TERMINAL}">{html.escape(said)}</pre>'
        )
        photographed(page, PICTURES / "doctor.png", 950, 32 + 18 * (said.count("\n") + 1))


if __name__ == "__main__":
    main()

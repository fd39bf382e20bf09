"""A process that checks cases as they come: one JSON line in, "begin" and the verdict out.

It is apart from the runner so that a crash of native code ends only this process, and is known by its case.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

from tests.sweep.cases import Case, check, lower_thresholds


def quieten() -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever models print goes to standard error
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    quieten()
    lower_thresholds()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        print(json.dumps(check(case).record(case)), file=answers, flush=True)


if __name__ == "__main__":
    main()

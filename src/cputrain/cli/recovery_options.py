"""--resume, --save-every, --on-nan and --grace of the commands that start trainings: one meaning, that of `run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cputrain import settings
from cputrain.cli.app import setting
from cputrain.cli.run_options import CHOICES, MEANINGS
from cputrain.integrations.settings import checked


def _of_run(name: str, *others: str) -> Any:
    return setting(MEANINGS[name], name, *others, metavar="|".join(CHOICES[name]))


@dataclass(frozen=True)
class RecoveryOptions:
    """As they were given."""

    resume: str | None = _of_run("--resume")
    save_every: str | None = _of_run("--save-every", "--save_every")
    on_nan: str | None = _of_run("--on-nan", "--on_nan")
    grace: str | None = setting(
        "What ranks have to save and to end, once they are asked to stop (default: 30).", "--grace", metavar="SECONDS"
    )

    def variables(self) -> dict[str, str]:
        """What ranks find in their environment."""
        given = {
            "resume": settings.RESUME,
            "save_every": settings.SAVE_EVERY,
            "on_nan": settings.ON_NAN,
            "grace": settings.GRACE,
        }
        return {
            variable: checked(variable, value, f"--{name.replace('_', '-')}")
            for name, variable in given.items()
            if (value := getattr(self, name)) is not None
        }

"""Which start of which run this process belongs to.

torchrun's agent may keep one store for all starts of its ranks, so whatever ranks write there carries this name: a rank
that was started anew would otherwise read what a dead one wrote.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def name(environ: Mapping[str, str] = os.environ) -> str:
    """ "RUN/START", the same on all ranks; starts count from 0.

    Agents count by themselves, and one that joined later has counted less. Where they make a store for each start, as
    c10d's rendezvous does on several machines, nothing needs to be told apart.
    """
    keeps_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    start = environ.get("TORCHELASTIC_RESTART_COUNT") if keeps_store else None
    return f"{environ.get('TORCHELASTIC_RUN_ID') or 'none'}/{start or '0'}"

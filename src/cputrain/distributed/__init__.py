"""The backend `ccl` of torch.distributed: `import cputrain.distributed`, then `init_process_group("ccl")`."""

from __future__ import annotations

from cputrain.distributed.backend import register
from cputrain.distributed.failures import CollectiveError, CollectivesDiffer, PeerDied, PeerLate

__all__ = ["CollectiveError", "CollectivesDiffer", "PeerDied", "PeerLate", "register"]

register()

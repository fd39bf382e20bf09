"""What a script gets from `import oneccl_bindings_for_pytorch` or `import torch_ccl`."""

from __future__ import annotations

import os

import cputrain.distributed  # noqa: F401 - as with the real package, the import registers the backend `ccl`

__all__ = ["cwd"]

# The guides' `source $(… print(cwd))/env/setvars.sh` finds MPI through it.
cwd = os.path.dirname(os.path.abspath(__file__))

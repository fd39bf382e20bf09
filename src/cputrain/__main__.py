"""`python -m cputrain` is the `cputrain` command."""

from __future__ import annotations

from cputrain.cli import main

if __name__ == "__main__":
    main()

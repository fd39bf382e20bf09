"""`python -m cputrain` is the `cputrain` command; ranks of `launch` start this file by its path."""

from __future__ import annotations

from cputrain.launch import import_path

if __name__ == "__main__":
    import_path.leave_out_first()
    from cputrain.cli import main

    main()

"""`import cputrain.compat`: the names of IPEX and of the oneCCL bindings resolve to cputrain."""

from __future__ import annotations

from cputrain.integrations.compat import install

install()

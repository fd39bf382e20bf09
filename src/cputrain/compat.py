"""`import cputrain.compat`: IPEX and the oneCCL bindings resolve to cputrain by the names that scripts import them by."""

from __future__ import annotations

from cputrain.integrations.compat import install

install()

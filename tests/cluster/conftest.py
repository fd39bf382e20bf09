"""What tests with the real kubectl start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cluster.api_server import served
from cluster.kubectl_shell import Here, kubectls


@pytest.fixture(params=kubectls(), ids=lambda path: path.name)
def here(request: Any, tmp_path: Path) -> Iterator[Here]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").symlink_to(request.param)
    # --watch looks every two seconds: a test needn't wait for it.
    with served(tmp_path) as (cluster, config), mock.patch("cputrain.cli.k8s._PAUSE", 0.05):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KUBE")}
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", "KUBECONFIG": str(config), "HOME": str(tmp_path)}
        yield Here(cluster, tmp_path, {**kept, **environ, "COLUMNS": "200"})

"""What torch asks of every process group besides operations: names, devices, sequence numbers.

torch keeps these in the backends behind a group, of which ccl's has none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class NamedGroup(dist.ProcessGroup):
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._sequence = 0
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return "ccl"

    def name(self) -> str:
        return "ccl"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"ccl has no backend for {device}.")
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

"""The collectives of a group of one rank: copies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cputrain.distributed import native_calls
from cputrain.distributed.transport import Transport


class AloneTransport(Transport):
    name = "alone"

    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> None:
        native_calls.dtype_number(tensor.dtype, reduction)  # refuses what several ranks would refuse

    def reduce(self, tensor: Tensor, reduction: int, root: int, timeout: float) -> None:
        native_calls.dtype_number(tensor.dtype, reduction)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        pass

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> None:
        outputs[0].copy_(tensor)

    def gather_uneven(self, outputs: Sequence[Tensor], tensor: Tensor, sizes: list[int], timeout: float) -> None:
        outputs[0].copy_(tensor)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float) -> None:
        outputs[0].copy_(tensor)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int, timeout: float) -> None:
        output.copy_(tensors[0])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], reduction: int, timeout: float) -> None:
        native_calls.dtype_number(output.dtype, reduction)
        output.copy_(tensors[0])

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], timeout: float) -> None:
        outputs[0].copy_(tensors[0])

    def barrier(self, timeout: float, name: str = "barrier") -> None:
        pass

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        raise ValueError("a group of one rank has no other rank to send to.")

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        raise ValueError("a group of one rank has no other rank to receive from.")

    def begin_call(
        self, text: str, name: str, number: int, dtype: object, size: int, root: int, reduction: int | None
    ) -> None:
        pass

    def report(self, kind: int, culprit: int) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

"""What a rank is told when a collective can't end: who is the cause, where it is, and what it did last."""

from __future__ import annotations

from dataclasses import dataclass

from cputrain import blame
from cputrain.distributed import native_calls
from cputrain.distributed.native_calls import Status


@dataclass(frozen=True)
class Peer:
    """Who a rank is, as it said itself when the group was made."""

    rank: int  # in the group
    global_rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.global_rank} (host {self.host}, process {self.pid})"


class CollectiveError(RuntimeError):
    """A collective that can't end; the group can't be used any more."""

    def __init__(self, sentence: str, cause: Peer | None = None) -> None:
        super().__init__(sentence)
        self.culprit = cause.global_rank if cause else None  # None: it is not known which rank is the cause


class PeerDied(CollectiveError):
    """A rank's process has ended, or its machine can't be reached."""


class PeerLate(CollectiveError):
    """A rank did not come within the group's timeout."""


class CollectivesDiffer(CollectiveError):
    """Ranks called different collectives, or the same one with different sizes or dtypes."""


def tell_launch(error: CollectiveError) -> None:
    """So that it names the cause, and not this rank, which is about to fail because of it."""
    if error.culprit is not None:
        blame.tell(blame.Blame(error.culprit, f"{type(error).__name__}: {error}"))


def describe_last(status: Status) -> str:
    """The culprit's last collective."""
    if status.sequence == 0:
        return "none in this group"
    name = dict(enumerate(native_calls.OPERATIONS)).get(status.operation, "unknown")
    dtype, reduction = native_calls.dtype_name(status.dtype), status.reduction if "reduce" in name else None
    return described(f"{name} number {status.sequence}", dtype, status.bytes, status.root, reduction)


def described(name: str, dtype: object, size: int, root: int = -1, reduction: int | None = None) -> str:
    """ "all_reduce number 17 (float32, 4,000 bytes, sum)": all in which the ranks must agree."""
    words = [str(dtype).removeprefix("torch."), f"{size:,} bytes"]
    words += [f"root {root}"] if root >= 0 else []
    words += [native_calls.REDUCTION_NAMES[reduction]] if reduction is not None else []
    return f"{name} ({', '.join(words)})"


def different_message(peer: int, sent: int, expected: int) -> CollectivesDiffer:
    return CollectivesDiffer(
        f"rank {peer} sent {sent:,} bytes, this rank receives {expected:,}: the tensors of send and recv must have the "
        "same size and dtype."
    )


def _last(theirs: str, mine: str) -> str:
    return f"; its last collective was {theirs}; this rank is in {mine}."


def died_elsewhere(peer: Peer, last: str, mine: str) -> PeerDied:
    """A rank of another machine; `last` is what it is known to have finished."""
    return PeerDied(f"{peer} died, or its machine can't be reached{_last(last, mine)}", peer)


def left_elsewhere(peer: Peer, last: str, mine: str) -> PeerDied:
    """A rank of another machine that ended without what this one waits for."""
    return PeerDied(f"{peer} has ended the group{_last(last, mine)}", peer)


def _differ(what: str, cause: Peer | None) -> CollectivesDiffer:
    must = "order, dtype and shape must be the same on all ranks."
    return CollectivesDiffer(f"the ranks called different collectives: {what}; {must}", cause)


def differ(peer: Peer, theirs: str, mine: str, found: str = "") -> CollectivesDiffer:
    return _differ(f"{peer} is in {theirs}, this rank is in {mine}{found}", peer)


def differ_elsewhere(who: str, mine: str, cause: Peer | None = None) -> CollectivesDiffer:
    """Found on another machine, between its ranks or with those of others."""
    return _differ(f"{who} can't go on, and this rank is in {mine}", cause)


def late(peer: Peer, seconds: float, last: str, mine: str) -> PeerLate:
    return PeerLate(f"{peer} is late: waited {seconds:g} s (ddp_timeout){_last(last, mine)}", peer)


def came_late(peer: Peer, seconds: float, mine: str) -> PeerLate:
    """This rank itself is the late one."""
    return PeerLate(
        f"this rank came late: {peer} waited {seconds:g} s (ddp_timeout), and has given up; it is in {mine}."
    )


def all_late(absent: list[Peer], seconds: float, found: PeerLate) -> PeerLate:
    """All that did not come to a monitored_barrier; the first error if no rank is known to be absent."""
    if not absent:
        return found
    names = ", ".join(map(str, absent))
    return PeerLate(f"{names} did not come to monitored_barrier: waited {seconds:g} s.", absent[0])


def late_elsewhere(timeout: float) -> PeerLate:
    return PeerLate(f"another machine is late: waited {timeout:g} s (ddp_timeout) for its ranks.")


def unknown_culprit(group: list[Peer]) -> int:
    """In place of a culprit's number: a machine failed, and no rank of it is known to be the cause."""
    return len(group)


def _from_elsewhere(kind: int, culprit: int, group: list[Peer], mine: str, seconds: float) -> CollectiveError:
    if culprit == unknown_culprit(group):
        if kind == native_calls.MISMATCH:
            return differ_elsewhere("ranks of another machine", mine)
        lost = f"another machine can't be reached, and it is not known which rank is gone; this rank is in {mine}."
        return late_elsewhere(seconds) if kind == native_calls.TIMEOUT else PeerDied(lost)
    peer = group[culprit]
    if kind == native_calls.MISMATCH:
        return differ_elsewhere(str(peer), mine, peer)
    if kind == native_calls.TIMEOUT:
        return late(peer, seconds, "the one before", mine)
    return died_elsewhere(peer, "the one before", mine)


def from_status(status: Status, peers: list[Peer], group: list[Peer], mine: str, seconds: float) -> CollectiveError:
    """The error for a failed native call; `peers` are the ranks of the shared memory, `group` is the whole group."""
    if status.culprit >= len(peers):
        return _from_elsewhere(status.kind, status.culprit - len(peers), group, mine, seconds)
    if status.kind == native_calls.ABORTED or status.culprit < 0:
        return CollectiveError(f"{mine} was ended: the process group has been shut down.")
    culprit, last = peers[status.culprit], describe_last(status)
    reporter = peers[status.reporter]
    found = "" if status.reporter == status.culprit else f" (found by rank {reporter.global_rank})"
    happened = {
        native_calls.DIED: (PeerDied, "died"),
        native_calls.LEFT: (PeerDied, "has ended the group"),
        native_calls.TIMEOUT: (PeerLate, f"is late: waited {seconds:g} s (ddp_timeout)"),
    }
    if status.kind not in happened:
        return differ(culprit, last, mine, found)
    kind, what = happened[status.kind]
    return kind(f"{culprit} {what}{found}{_last(last, mine)}", culprit)

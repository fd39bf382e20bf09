"""Requests to stop: a signal sets a flag, the ranks agree at the end of a step, and after one save the process ends.

A training listens from its begin to its end. Until it has asked `agreed` for the first time there is nothing to save,
and a request ends the process at once. Of several ranks all must take part in `agreed`: a rank whose peers are gone
fails there, and so never writes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from cputrain import blame, settings

if TYPE_CHECKING:
    import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


class _Listener:
    """A training of this process; `replaced` are the handlers that were there before."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.replaced: dict[int, Any] = {}
        self.request = ""  # the signal's name
        self.can_save = False


_now: _Listener | None = None  # one at a time
_to_ignore: set[int] = set()  # in a data loader's worker


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """While it lasts, a signal is a request; within another's, this one changes nothing."""
    if _now is not None:
        yield
        return
    listen()
    try:
        yield
    finally:
        leave()


def listen() -> None:
    """A script's own handlers stay, and what it ignores is ignored. Other threads than the main one can't set any."""
    global _now
    assert _now is None, "a training listens already"
    _now = _Listener()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _now.replaced[number] = signal.signal(number, _note)
    _spare_workers()


def leave() -> None:
    global _now
    listener, _now = _now, None
    for number, handler in listener.replaced.items() if listener else ():
        if signal.getsignal(number) is _note:
            signal.signal(number, handler)


def requested() -> str:
    """The signal by which this process was asked to stop, or nothing."""
    return _now.request if _now else ""


def agreed(group: dist.ProcessGroup | None = None) -> bool:
    """Whether any rank was asked to stop; all ranks of the group have to call it, at the same place."""
    assert _now is not None, "a training has to listen first"
    asked = bool(_now.request)
    _now.can_save = True
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        if asked and settings.number(settings.WORLD_SIZE, 1) > 1 and group is None:
            end()  # of several ranks that can't agree none writes
        return asked
    flag = torch.tensor([float(asked)])
    try:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    except Exception:
        if asked:  # the others were asked as well, and have ended already
            end()
        raise
    return bool(flag.item())


def end() -> NoReturn:
    """Nothing of the script runs after this, unless it catches SystemExit."""
    leave()
    raise SystemExit(blame.STOPPED)


def _note(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    if _now is None or blame.peer_has_failed():
        _as_before(number, frame)
    elif os.getpid() != _now.process:  # a child that was forked: Ctrl-C and the like reach it, too
        if number == signal.SIGTERM:
            _as_before(number, frame)
    elif not _now.can_save:
        end()
    elif not _now.request:
        _now.request = name
        # Not by the logger: the main thread may be within it.
        os.write(2, f"cputrain: {name}: the training saves its state after this step, and ends.\n".encode())
    elif number == signal.SIGINT:
        _as_before(number, frame)


def _as_before(number: int, frame: FrameType | None) -> None:
    before = _now.replaced.get(number, signal.SIG_DFL) if _now else signal.SIG_DFL
    if callable(before):
        before(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# --- Workers of data loaders: a signal to a whole process group reaches them, and without them no step ends ----------


def _spare_workers() -> None:
    """torch's worker sets its own handler for SIGTERM when it begins; it has to be ours where it was forked by us."""
    from torch.utils.data._utils import signal_handling

    stock: Callable[[], None] = signal_handling._set_worker_signal_handlers
    if getattr(stock, "spares", False):
        return

    def handlers() -> None:
        stock()
        if _now is not None:
            _to_ignore.update(_SIGNALS)
            for number in _now.replaced:
                signal.signal(number, _once)

    handlers.spares = True  # type: ignore[attr-defined]
    signal_handling._set_worker_signal_handlers = handlers


def _once(number: int, frame: FrameType | None) -> None:
    """The first is meant for the training, which ends its workers; one that hangs is told again by multiprocessing."""
    if number in _to_ignore:
        _to_ignore.discard(signal.SIGTERM)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

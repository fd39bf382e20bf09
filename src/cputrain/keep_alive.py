"""Connections that break when the other machine is gone, also if nothing is sent.

The probes are answered by the other kernel: a process that computes, holds the GIL or is stopped is late, not dead.
"""

from __future__ import annotations

import socket

_IDLE, _INTERVAL, _PROBES = 3, 2, 3  # seconds, seconds: broken after 9 s without an answer


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _INTERVAL * _PROBES))

"""How long a machine that doesn't answer is waited for, and connections that break then, also if nothing is sent.

The kernel of the other machine answers the probes, and its sshd ssh's questions: a process that computes, holds the GIL
or is stopped is late, not dead. A launch ends within 15 s after a link went down:

    7 s   connections break; a rank may have sent something up to 2 s after the link went down, and notices at 9 s
    8 s   ssh gives up
    13 s  the ranks have named the rank that is gone, and ended; those that haven't are ended
"""

from __future__ import annotations

import socket

# Seconds, seconds, and how many probes: broken after 7 s without an answer.
_IDLE, _INTERVAL, _PROBES = 2, 1, 5
GONE_SECONDS = _IDLE + _INTERVAL * _PROBES
# ssh asks after so many seconds of silence, so often; it gives up when it would ask once more.
SSH_INTERVAL, SSH_QUESTIONS = 2, 3
SSH_SECONDS = SSH_INTERVAL * (SSH_QUESTIONS + 1)
# An mpirun whose ssh gives up ends the ranks at once: it is to notice only after all that is above.
MPIRUN_SSH_INTERVAL = 5
# For ranks, which notice later than those who watch them, to say which rank is gone, and to end by themselves.
LAST_WORDS_SECONDS = 5.0


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GONE_SECONDS)

"""Takes the ports that a server has looked up before it binds them: a race lost on purpose.

Copied as `sitecustomize.py` into a folder on the server's PYTHONPATH. The first process that
closes a probing socket in the window `PORT_THIEF_WINDOW` (`FIRST-LAST`) makes the file
`PORT_THIEF_MARK`, and takes this port and every further one that it probes, until it ends. With
the mark made, later processes keep their ports.
"""

from __future__ import annotations

import os
import socket

Plain = socket.socket
FIRST, LAST = map(int, os.environ["PORT_THIEF_WINDOW"].split("-"))
MARK = os.environ["PORT_THIEF_MARK"]
stolen: list[socket.socket] = []


def is_mine() -> bool:
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return bool(stolen)
    return True


class Probed(socket.socket):
    """A socket that loses its port when a `with` block closes it, as vLLM's probes are."""

    def __exit__(self, *args: object) -> None:
        inet = self.family == socket.AF_INET and self.type == socket.SOCK_STREAM
        port = self.getsockname()[1] if inet and self.fileno() != -1 else 0
        super().__exit__(*args)
        if FIRST <= port <= LAST and is_mine():
            thief = Plain(socket.AF_INET, socket.SOCK_STREAM)
            thief.bind(("", port))
            thief.listen(1)
            stolen.append(thief)


socket.socket = Probed  # type: ignore[misc]

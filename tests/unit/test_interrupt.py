"""Signals wait for the end of a teardown and then interrupt, once. In processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from ep_ray import interrupt
from ep_ray.interrupt import uninterrupted
interrupt.install()
me, signum = os.getpid(), int(sys.argv[1])
try:
    with uninterrupted():
        with uninterrupted():
            os.kill(me, signum)
            os.kill(me, signum)
        print("torn down", flush=True)
    print("not reached", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    os.kill(me, signum)
    print("not reached", flush=True)
except KeyboardInterrupt:
    print("interrupted at once", flush=True)
interrupt.ignore()
os.kill(me, signum)
print("ignored", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_for_a_teardown(signum: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(int(signum))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines() == [
        "torn down",
        "interrupted",
        "interrupted at once",
        "ignored",
    ]
    assert found.stderr.count("please wait") == 1

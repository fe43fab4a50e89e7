"""Memory limit of a worker process, independent of address space reserved by libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.text import worker

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
WORKER = f"""
import mmap
from shared.text import worker

taken = mmap.mmap(-1, 2048 * {MB}, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

def take(num_bytes):
    try:
        return str(len(bytearray(num_bytes)))
    except MemoryError:
        raise worker.WorkerError("too much", "message") from None

worker.run(lambda given: take, read=int, deadline_s=10.0, max_memory=256 * {MB})
"""


@pytest.mark.parametrize("limit", ["", "ulimit -v 4000000; "])
def test_worker_memory_limit_excludes_reserved_addresses(limit):
    asked = b"".join(map(worker.pack, (0, 128 * MB, 512 * MB, 64 * MB)))
    command = ["sh", "-c", f'{limit}exec "$0" -c "$1"', sys.executable, WORKER]
    output = subprocess.run(command, input=asked, capture_output=True, cwd=ROOT, check=True).stdout
    refused = worker.REFUSAL + json.dumps(["too much", "message"]).encode()
    taken = (worker.DONE + str(number * MB).encode() for number in (128, 64))
    first, last = map(worker.frame, taken)
    assert output == first + worker.frame(refused) + last

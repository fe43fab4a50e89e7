"""External corpora: built concurrently with steps, and abandoned at shutdown."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BUILDS_FOR_EVER = """
import time
from types import SimpleNamespace
from shared.engine.ngram.corpus import Corpus
from shared.process.corpora import CorpusHandler

Corpus.build = lambda words: time.sleep(3600)
index = SimpleNamespace(corpora=SimpleNamespace(check=lambda name, words: None))
corpora = CorpusHandler(index)
corpora.add(1, "large", b"")
assert corpora.busy and not corpora.answers()
print("ends", flush=True)
"""


def test_process_exit_does_not_wait_for_corpus_build():
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDS_FOR_EVER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ends\n"
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.stdout.close()

"""A start as a whole."""

import signal

from shared.process import launch


def test_an_interrupt_ends_a_start_at_once_as_a_term_does(monkeypatch):
    """From its first line to its last: neither a traceback nor a wait for a compiler."""
    seen = []

    def parse(argv):
        seen.append(signal.getsignal(signal.SIGINT))
        raise ValueError("refused")

    monkeypatch.setattr(launch, "parse", parse)
    before = signal.getsignal(signal.SIGINT)
    assert launch.launch([], lambda: None) == 2
    assert seen == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is before

"""The limit of JAX step programs in a run without the matrix."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.support.counting import MOST_PROGRAMS, check_limit


@pytest.mark.parametrize(
    ("excess", "before", "after"), [(0, 0, 0), (1, 0, 1), (1, 2, 2)], ids=["at", "above", "failed"]
)
def test_excess_programs_fail_session_by_file(excess: int, before: int, after: int) -> None:
    reports: list[str] = []
    hook = SimpleNamespace(
        pytest_runtest_logreport=lambda report: reports.append(report.longreprtext)
    )
    session = SimpleNamespace(config=SimpleNamespace(hook=hook), exitstatus=before)
    check_limit(session, Counter({"few.py": 3, "many.py": MOST_PROGRAMS - 3 + excess}))
    assert session.exitstatus == after
    assert len(reports) == excess
    for report in reports:
        assert report.splitlines()[0].startswith(f"{MOST_PROGRAMS + 1} step programs")
        assert report.splitlines()[1:] == [f"  {MOST_PROGRAMS - 2} many.py", "   3 few.py"]

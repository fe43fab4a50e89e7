"""Engine of one revision in `bench.steps.compare_revisions`: a timed round for each line it reads.

It uses names of `bench` that every compared revision must have.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.common.draft_config import Draft
from bench.common.environment import versions
from bench.common.session import Load, Session
from bench.steps.decode_steps import begun
from bench.steps.decode_steps import options as step_options


def main() -> int:
    """Writes versions and device to the pipe, then a line of JSON for each line of standard input.

    Arguments: file descriptor of the pipe, then those of `bench.steps.decode_steps` for one line.
    """
    pipe, *arguments = sys.argv[1:]
    options = step_options().parse_args(arguments)
    with os.fdopen(int(pipe), "w", buffering=1) as answers, _session(options) as (session, load):
        session.round(load)  # warms up
        facts = versions(options.backend[0], "cuda" if session.served.device == "gpu" else "cpu")
        print(json.dumps(facts), file=answers)
        for _ in sys.stdin:
            found = session.round(load)
            answer = {"ms": found.blocks(options.steps), "outputs": found.texts}
            print(json.dumps(answer), file=answers)
    return 0


@contextmanager
def _session(options: Any) -> Iterator[tuple[Session, Load]]:
    (backend,), (drafts,), (batch,) = options.backend, options.drafts, options.batch
    load = Load(batch=batch, prompt=options.input, output=options.output, temperature=0, top_p=1)
    (overlap,), (ranks,) = options.overlap_depth, options.tp_size
    with begun(backend, Draft.parse(drafts), load, options, overlap, ranks) as session:
        yield session, load


if __name__ == "__main__":
    sys.exit(main())

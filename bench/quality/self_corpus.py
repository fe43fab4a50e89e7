"""Corpus of the model's own outputs, for drafting when the same prompts return.

It models a service with repeated questions. Plain decoding makes it at temperature 1 with
seeds that measured runs do not use. So it contains other samples of the same answers, as far as the
model has others, and no prompt.
"""

from collections.abc import Sequence

import numpy as np

from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import Request, SamplingParams
from shared.spec.gumbel_noise import derive_seed
from tests.support.in_process_engine import Served, timed

NAME = "own"
TEMPERATURE = 1.0
OTHER_CHOICE = 1
"""The measured runs have the seeds of choice 0."""


def other_outputs(
    served: Served, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[list[int]]:
    """Returns outputs of a server without drafts, with other seeds than the measured ones."""
    requests = [
        Request(
            request_id=index,
            prompt=prompt,
            sampling=SamplingParams(
                temperature=TEMPERATURE,
                seed32=derive_seed(index, OTHER_CHOICE),
                max_tokens=max_tokens,
                stop_token_ids=served.eos_ids,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    return [outcome.tokens for outcome in timed(served, requests).outcomes]


def add(served: Served, outputs: Sequence[Sequence[int]]) -> None:
    """Lets a server draft from outputs.

    Raises:
      ValueError: Its drafter does not read corpora.
    """
    controller = served.engine.controller
    if not isinstance(controller, NgramController):
        raise ValueError("corpus=own needs the drafter NGRAM")
    words = [token for output in outputs for token in (*output, SEPARATOR)]
    controller.index.corpora.add(NAME, Corpus.build(np.array(words, np.int32)))

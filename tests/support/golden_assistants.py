"""Assistants of the golden folders: the golden tests' interface, and its implementations.

One object is one request, after the target's prefill of its prompt.
"""

from pathlib import Path

import jax
import numpy as np
import torch

from jax_impl import weights as jax_weights
from jax_impl.backend import compiler_options
from jax_impl.drafters import assistant as jax_assistant
from jax_impl.model import Model as JaxTarget
from jax_impl.ops.sampling import lm_head as jax_lm_head
from shared.boundary.tp_group import SINGLE_RANK
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.spec import assistant as spec_assistant
from tests.support.golden_jax import JaxModel
from tests.support.golden_jax import ints as jax_ints
from tests.support.golden_models import (
    TABLE,
    Array,
    SpecModel,
    golden_head_files,
    load_golden_head,
)
from tests.support.golden_torch import CPU, TorchModel
from tests.support.golden_torch import ints as torch_ints
from torch_impl import weights as torch_weights
from torch_impl.drafters import assistant as torch_assistant
from torch_impl.ops.sampling import lm_head as torch_lm_head

TARGETS = {"gemma4_assistant": "gemma4_moe", "gemma4_assistant_centroids": "gemma4"}
"""Folders of assistants, and of the target of each."""


class SpecAssistant:
    """The specification's assistant.

    Attributes:
      hidden: Hidden state of the target at the last token of the prompt.
    """

    hidden: Array

    def __init__(self, folder: Path, target: Path, prompt: Array) -> None:
        model = SpecModel(target)
        self.hidden, self._kv = model.prefill(prompt, None).hidden[-1:], model.pools
        head = load_golden_head(folder, target)
        self._own = spec_assistant.Assistant(head, model.config, model.weights)
        self._rows = spec_assistant.reading_rows(np.array([len(prompt)]), TABLE, {}, width=1)

    def level(self, token: int, hidden: Array) -> tuple[Array, Array]:
        """Runs one row; returns its logits, and the hidden state for the next level."""
        own = self._own.forward(self._rows, np.array([token]), hidden, self._kv)
        return self._own.logits(own), self._own.carried(own)


class TorchAssistant:
    """The same with torch."""

    hidden: Array

    def __init__(self, folder: Path, target: Path, prompt: Array) -> None:
        model = TorchModel(target)
        self.hidden, self._kv = model.prefill(prompt, None).hidden[-1:], model.pools
        own, files = golden_head_files(folder, target)
        read = torch_weights.load_head(files, own, "float32", CPU, lambda num_bytes: None)
        self._own = torch_assistant.Assistant.of(model.target, read)
        until, table = torch_ints([len(prompt)]), torch_ints(TABLE)
        self._rows = torch_assistant.reading_rows(until, table, {}, width=1)

    def level(self, token: int, hidden: Array) -> tuple[Array, Array]:
        token, hidden = torch_ints([token]), torch.from_numpy(hidden)
        own = self._own.forward(self._rows, token, hidden, self._kv)
        logits = torch_lm_head.scores(self._own.projected(own))
        return logits.numpy(), self._own.carried(own).numpy()


class JaxAssistant:
    """The same of JAX, as one program."""

    hidden: Array

    def __init__(self, folder: Path, target: Path, prompt: Array) -> None:
        model, cpu = JaxModel(target), jax.devices("cpu")[0]
        self.hidden, self._kv = model.prefill(prompt, None).hidden[-1:], model.pools
        self._config, (self._head, files) = (
            config_from_folder(target),
            golden_head_files(folder, target),
        )
        read = jax_weights.load_head(files, self._head, np.float32, cpu, lambda num_bytes: None)
        arrays = load_all(target, self._config, False)
        loaded = jax_weights.from_arrays(arrays, self._config, np.float32, cpu)
        self._arrays, self._until = (loaded, read), jax_ints([len(prompt)])
        self._run = jax.jit(self._level, compiler_options=compiler_options(cpu, quick_compile=True))

    def level(self, token: int, hidden: Array) -> tuple[Array, Array]:
        token = jax_ints([token])
        logits, carried = self._run(self._arrays, self._until, token, hidden, self._kv)
        return np.asarray(logits), np.asarray(carried)

    def _level(self, arrays, until, tokens, hidden, kv):
        loaded, read = arrays
        read = jax_weights.head_of(self._head, read, False)
        target = JaxTarget.of(
            self._config, jax_weights.weights_of(self._config, loaded, False), SINGLE_RANK
        )
        own = jax_assistant.Assistant.of(target, read)
        rows = jax_assistant.reading_rows(until, jax_ints(TABLE), {}, width=1)
        out, _ = own.forward(rows, tokens, hidden, kv)
        return jax_lm_head.scores(own.projected(out)), own.carried(out)


ASSISTANTS = {"spec": SpecAssistant, "torch": TorchAssistant, "jax": JaxAssistant}

"""Trains the eyes of the demo model: `python -m models.demo.train_vlm --minutes 2 --out FOLDER`.

The language model stays as it is. A small vision tower learns to make, of pictures that are drawn
on the way, the embeddings of a sentence that says what they show; the model, which never saw a
picture, then reads that sentence where the picture stands. Writes `tower.safetensors`.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from jax_impl import tower
from jax_impl.weights import Loaded, tower_of
from models.demo.synthetic_images import COUNTS, HEIGHT, OUTLINES, SENTENCE, SHADES, WIDTH, drawn
from shared.models.families import vision_from_folder
from shared.models.parameters import Parameter
from shared.models.pictures import pictures_from_folder
from shared.models.saving import split
from shared.models.tower import tower_parameters
from shared.spec import tower as spec

HERE = Path(__file__).parent
FOLDER, TEXT = HERE / "seeing", HERE / "target"
FILE = "tower.safetensors"
HELD_OUT = 1 << 20
"""From this seed on pictures are for the check."""

SHARPNESS = 20.0
"""Of the choice among words by their distance; see `loss_of`."""

Params = dict[str, jax.Array]


class Batch(NamedTuple):
    """Some pictures, and the tokens of their sentences."""

    pictures: np.ndarray
    tokens: np.ndarray


def batch_of(seed: int, size: int) -> Batch:
    """Pictures of one seed."""
    rng, tokenizer = np.random.default_rng(seed), Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    found = [drawn(rng) for _ in range(size)]
    tokens = [tokenizer.encode(each.sentence).ids for each in found]
    return Batch(np.stack([each.pixels.reshape(-1) for each in found]), np.array(tokens))


def words() -> np.ndarray:
    """The tokens of all sentences, each once."""
    tokenizer = Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    told = itertools.product(SHADES, OUTLINES, COUNTS)
    sentences = [SENTENCE.format(color=a, thing=b, count=c) for a, b, c in told]
    return np.unique(np.concatenate([tokenizer.encode(each).ids for each in sentences]))


def new_params(wanted: list[Parameter], seed: int) -> Params:
    """Of a tower that has learned nothing."""
    rng, made = np.random.default_rng(seed), {}
    for each in wanted:
        values = np.zeros(each.shape, np.float32)
        if each.name.endswith("norm"):
            values += 1
        elif not each.name.endswith("_bias"):
            size = 0.02 if each.name == "vision.places" else each.shape[-1] ** -0.5
            values = rng.standard_normal(each.shape, np.float32) * np.float32(size)
        made[each.name] = jnp.asarray(values)
    return made


class Task:
    """What is trained: a tower by the folder's config, to the rows of the text's embedding."""

    def __init__(self) -> None:
        vision = vision_from_folder(FOLDER)
        assert vision is not None
        self.vision, self.wanted = vision, tower_parameters(vision)
        tensors = load_file(TEXT / "model.safetensors")
        table = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight"))
        self.table, self.words = table.astype(np.float32), words()
        blank = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        pixels = spec.pixels_of(blank, vision, pictures_from_folder(FOLDER, vision))
        self.pixels = {name: jnp.asarray(x) for name, x in vars(pixels).items()}

    def rows(self, params: Params, pictures: jax.Array) -> jax.Array:
        """What the tower makes of pictures."""
        stacks = {each.name: params[each.name] for each in self.wanted if each.stacked}
        alone = {name: x for name, x in params.items() if name not in stacks}
        weights = tower_of(Loaded(alone=alone, stacks=stacks))

        def one(picture: jax.Array) -> jax.Array:
            pixels = tower.Pixels(**self.pixels | {"bytes": picture})
            return tower.encoded(self.vision, weights, tower.patches(self.vision, pixels))

        return jax.vmap(one)(pictures)

    def loss_of(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """How far rows lie from the embeddings, and from those of other words; and what is right.

        The second result is the share of sentences that are right in every word.
        """
        rows = self.rows(params, jnp.asarray(batch.pictures))
        table = jnp.asarray(self.table[self.words])
        place = jnp.searchsorted(jnp.asarray(self.words), batch.tokens)
        unit = rows.shape[-1] * jnp.mean(table**2)
        squares = (rows**2).sum(-1, keepdims=True) - 2 * rows @ table.T + (table**2).sum(-1)
        far = squares / unit
        own = jnp.take_along_axis(far, place[..., None], axis=-1)
        missed = optax.softmax_cross_entropy_with_integer_labels(-SHARPNESS * far, place)
        is_right = (far.argmin(-1) == place).all(axis=-1)
        return own.mean() + missed.mean(), is_right.mean()


def train(task: Task, options: argparse.Namespace) -> Params:
    """Trains for the minutes that are given, by a rate that falls to nothing with them."""
    params = new_params(task.wanted, options.seed)
    made = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, weight_decay=0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), made)
    state: Any = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any, batch: Batch, rate: jax.Array) -> Any:
        (loss, right), gradient = jax.value_and_grad(task.loss_of, has_aux=True)(params, batch)
        state[1].hyperparams["learning_rate"] = rate
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss, right

    began, seen = 0.0, []
    for number, batch in enumerate(batches(options)):
        # The first step is compiled, which is none of the minutes.
        began = time.monotonic() if number < 2 else began
        done = (time.monotonic() - began) / (60 * options.minutes)
        if done >= 1:
            break
        rate = options.learning_rate * min(1, 20 * done) * (1 + np.cos(np.pi * done)) / 2
        params, state, loss, right = jax.block_until_ready(
            step(params, state, batch, jnp.float32(rate))
        )
        seen.append((loss, right))
        if number % 100 == 99:
            loss, right = np.mean(np.array(jax.device_get(seen[-100:])), axis=0)
            print(f"{number + 1} steps, loss {loss:.3f}, right {right:.2%}", flush=True)
    return params


def batches(options: argparse.Namespace) -> Iterator[Batch]:
    """Pictures that processes draw ahead."""
    # Not forked: JAX has threads.
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        ahead = 4 * options.workers
        waiting = [pool.submit(batch_of, seed, options.batch) for seed in range(ahead)]
        for seed in itertools.count(ahead):
            waiting.append(pool.submit(batch_of, seed, options.batch))
            yield waiting.pop(0).result()


def save(task: Task, params: Params, folder: Path) -> None:
    """Writes the tower under its public names, in bfloat16."""
    tensors: dict[str, np.ndarray] = {}
    for each in task.wanted:
        tensors |= split(each, np.asarray(params[each.name]).astype(ml_dtypes.bfloat16), "model.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE)


def main() -> None:
    """Trains, checks on pictures of other seeds, and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the file")
    parser.add_argument("--batch", type=int, default=128, help="pictures of a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that draw")
    options = parser.parse_args()
    task = Task()
    params = train(task, options)
    save(task, params, options.out)
    checked = jax.jit(task.loss_of)
    right = [checked(params, batch_of(HELD_OUT + i, options.batch))[1] for i in range(8)]
    print(f"right in every word: {np.mean(right):.2%} of {8 * options.batch} other pictures")


if __name__ == "__main__":
    main()

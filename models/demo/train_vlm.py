"""Trains the demo VLM: `python -m models.demo.train_vlm --minutes 2 --out FOLDER`.

The language model is frozen. A small vision encoder learns to map synthetic images to the token
embeddings of their captions. The language model, which was not trained on images, then reads the
caption in place of the image tokens. Writes the weights of the encoder.
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

from jax_impl import vision_encoder
from jax_impl.weights import Loaded, vision_encoder_of
from models.demo.synthetic_images import (
    COUNTS,
    HEIGHT,
    OUTLINES,
    SENTENCE,
    SHADES,
    WIDTH,
    generate_image,
)
from shared.models.families import vision_from_folder
from shared.models.image_processor import images_from_folder
from shared.models.model_folder import ModelFolder
from shared.models.parameter import Parameter
from shared.models.saving import split
from shared.models.vision_parameters import vision_encoder_parameters
from shared.spec import vision_encoder as spec

HERE = Path(__file__).parent
FOLDER, TEXT = HERE / "vlm", HERE / "target"
FILE = "tower.safetensors"
HELD_OUT = 1 << 20
"""First seed of the images for evaluation."""

SHARPNESS = 20.0
"""Scale of the distances in the softmax over words; see `loss_of`."""

Params = dict[str, jax.Array]


class Batch(NamedTuple):
    """Images and the token ids of their captions."""

    images: np.ndarray
    tokens: np.ndarray


def batch_of(seed: int, size: int) -> Batch:
    """Generates the batch of a seed."""
    rng, tokenizer = np.random.default_rng(seed), Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    found = [generate_image(rng) for _ in range(size)]
    tokens = [tokenizer.encode(each.sentence).ids for each in found]
    return Batch(np.stack([each.pixels.reshape(-1) for each in found]), np.array(tokens))


def words() -> np.ndarray:
    """Returns the distinct token ids of all captions, sorted."""
    tokenizer = Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    fields = itertools.product(SHADES, OUTLINES, COUNTS)
    sentences = [SENTENCE.format(color=a, thing=b, count=c) for a, b, c in fields]
    return np.unique(np.concatenate([tokenizer.encode(each).ids for each in sentences]))


def new_params(wanted: list[Parameter], seed: int) -> Params:
    """Returns initial parameters of the vision encoder."""
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
    """Training task: a vision encoder by the folder's config, and the target embedding table."""

    def __init__(self, target: Path) -> None:
        vision = vision_from_folder(FOLDER)
        assert vision is not None
        self.vision, self.wanted = vision, vision_encoder_parameters(vision)
        tensors = load_file(target / "model.safetensors")
        table = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight"))
        self.table, self.words = table.astype(np.float32), words()
        blank = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        pixels = spec.pixels_of(blank, vision, images_from_folder(ModelFolder(FOLDER), vision))
        self.pixels = {name: jnp.asarray(x) for name, x in vars(pixels).items()}

    def rows(self, params: Params, images: jax.Array) -> jax.Array:
        """Returns the image embeddings."""
        stacks = {each.name: params[each.name] for each in self.wanted if each.stacked}
        alone = {name: x for name, x in params.items() if name not in stacks}
        weights = vision_encoder_of(Loaded(alone=alone, stacks=stacks))

        def one(image: jax.Array) -> jax.Array:
            pixels = vision_encoder.Pixels(**self.pixels | {"bytes": image})
            return vision_encoder.encoded(
                self.vision, weights, vision_encoder.patches(self.vision, pixels)
            )

        return jax.vmap(one)(images)

    def loss_of(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the share of captions that are correct in every word.

        The loss is the squared distance to the caption's embeddings plus a cross-entropy over the
        distances to all words.
        """
        rows = self.rows(params, jnp.asarray(batch.images))
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
    """Trains for `options.minutes`; the learning rate decays to zero over that time."""
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
        # The time starts after the first step, which compiles.
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
            print(f"{number + 1} steps, loss {loss:.3f}, correct {right:.2%}", flush=True)
    return params


def batches(options: argparse.Namespace) -> Iterator[Batch]:
    """Yields batches that worker processes generate ahead of time."""
    # Spawned, not forked: JAX has threads.
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        ahead = 4 * options.workers
        waiting = [pool.submit(batch_of, seed, options.batch) for seed in range(ahead)]
        for seed in itertools.count(ahead):
            waiting.append(pool.submit(batch_of, seed, options.batch))
            yield waiting.pop(0).result()


def save(task: Task, params: Params, folder: Path) -> None:
    """Writes the vision encoder in bfloat16 under its public tensor names."""
    tensors: dict[str, np.ndarray] = {}
    for each in task.wanted:
        tensors |= split(each, np.asarray(params[each.name]).astype(ml_dtypes.bfloat16), "model.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE)


def main() -> None:
    """Trains, writes the weights and evaluates on images of other seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for tower.safetensors")
    parser.add_argument("--target", type=Path, default=TEXT, help="folder of the language model")
    parser.add_argument("--batch", type=int, default=128, help="images in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that generate images")
    options = parser.parse_args()
    task = Task(options.target)
    params = train(task, options)
    save(task, params, options.out)
    checked = jax.jit(task.loss_of)
    right = [checked(params, batch_of(HELD_OUT + i, options.batch))[1] for i in range(8)]
    print(f"correct in every word: {np.mean(right):.2%} of {8 * options.batch} other images")


if __name__ == "__main__":
    main()

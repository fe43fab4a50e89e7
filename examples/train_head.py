"""Trains an EAGLE-3 head and generates with it: `python -m examples.train_head OUT`.

The settings finish within minutes on a CPU. docs/training_drafts.md has the settings of a head with
a high acceptance length.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

from bench.common.server import HIDDEN, prompt_count
from jax_impl.train import main as train
from models.demo.problems import problems
from torch_impl import LLM, SamplingParams

TARGET = "models/demo/target"


def main(out: str, steps: int, num_prompts: int) -> None:
    """Writes prompts, trains a head, and generates for one prompt with it."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "prompts.jsonl"
    chats = [example.messages[:1] for example in islice(problems("train", 1), num_prompts)]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    head = str(folder / "head")
    flags = ["--target", TARGET, "--draft", "eagle3", "--data", str(data), "--out", head]
    sizes = [
        "--steps",
        str(steps),
        "--prompts",
        str(num_prompts),
        "--output-tokens",
        "48",
        "--warmup",
        "1",
    ]
    sizes += ["--batch-tokens", "1024"]  # about ten short chats
    assert train([*flags, *sizes]) == 0
    drafting = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head}
    with LLM(TARGET, max_running_requests=1, context_length=256, **drafting) as llm:
        (answer,) = llm.chat(chats[0], SamplingParams(temperature=0, max_tokens=48))
    print(f"acceptance length {answer.outputs[0].accept_length:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder for the prompts and the head")
    parser.add_argument("old_steps", nargs="?", type=int, help=HIDDEN)
    parser.add_argument("old_count", nargs="?", type=int, help=HIDDEN)
    parser.add_argument("--steps", type=int, default=200)
    prompt_count(parser, 64)
    given = parser.parse_args()
    main(given.out, given.old_steps or given.steps, given.old_count or given.num_prompts)

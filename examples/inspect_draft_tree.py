"""Prints drafted and accepted tokens of each step: `python -m examples.inspect_draft_tree`.

The EAGLE-3 head of the demo model drafts chains of 3 tokens.
"""

from torch_impl import LLM, SamplingParams

QUESTION = "Raj makes 6 cards a day for 18 days. How many cards does Raj make?"


def main() -> None:
    """Prints one line per step: source, accepted draft tokens and text."""
    options = {"speculative_algorithm": "EAGLE3", "context_length": 256}
    with LLM(speculative_draft_model_path="models/demo/eagle3", **options) as llm:
        asked = SamplingParams(temperature=0, max_tokens=64, return_trace=True)
        (answer,) = llm.chat([{"role": "user", "content": QUESTION}], asked)
    for step in answer.outputs[0].steps:
        said = "".join(token["text"] for token in step["tokens"])
        accepted = sum(draft["accepted"] for draft in step["drafts"])
        print(f"{step['source']:8} {accepted} of {len(step['drafts'])} drafts accepted: {said!r}")


if __name__ == "__main__":
    main()

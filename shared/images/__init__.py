"""Images of requests: decoding, resizing, and placeholder tokens in the prompt."""

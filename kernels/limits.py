"""What the kernels of both languages take, as plain data: the start asks it without a GPU."""

HEAD_SIZES = tuple(range(16, 257, 16))
"""Of an attention head: multiples of the fewest columns that a matrix unit takes."""

DELTA_SIZES = (16, 32, 64, 128)
"""Of the keys and of the values of a gated-delta head."""

MOST_NODES = 64
"""Of a tree, whose nodes are the bits of one or two words in `mix` and `delta_mix`."""

"""In which blocks of columns the heads of a picture's patches lie, for both languages."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """Of a head, and of the blocks that hold it, which are powers of two.

    Attributes:
      heads: How many there are.
      main, rest: Columns of a head in each of its two blocks, or all of them and 0.
      main_block: Columns of its first block; those past the head's are 0.
      rest_block: Of the second block of queries and keys, as well. Without a rest there is none.
      beside_block: Of the second block of values, which has a 1 behind the rest.
    """

    heads: int
    main: int
    rest: int
    main_block: int
    rest_block: int
    beside_block: int

    @property
    def rests(self) -> int:
        """Columns of the first blocks of all heads, behind which are the second ones."""
        return 3 * self.heads * self.main_block

    @property
    def besides(self) -> int:
        """Columns before the second blocks of values."""
        return self.rests + 2 * self.heads * self.rest_block

    @property
    def width(self) -> int:
        """Columns of all blocks."""
        return self.besides + self.heads * self.beside_block


def sizes_of(heads: int, D: int) -> Sizes:
    """The blocks of so many heads of D columns."""
    main = 1 << (D.bit_length() - 1)
    rest = D - main
    return Sizes(
        heads=heads,
        main=main,
        rest=rest,
        main_block=max(16, main),  # of fewer a matrix unit takes none
        rest_block=_block_of(rest) if rest else 0,
        beside_block=_block_of(rest + 1),
    )


def _block_of(columns: int) -> int:
    """The least power of two that has room for them, and that a matrix unit takes."""
    return max(16, 1 << (columns - 1).bit_length())

"""Column-block layout of vision encoder heads, as plain data for both backends."""

from typing import NamedTuple


class EncoderHeadSizes(NamedTuple):
    """Sizes of a head and of its column blocks, which are powers of two.

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
        """Columns of the first blocks of all heads; the second blocks follow them."""
        return 3 * self.heads * self.main_block

    @property
    def besides(self) -> int:
        """Columns before the second blocks of values."""
        return self.rests + 2 * self.heads * self.rest_block

    @property
    def width(self) -> int:
        """Columns of all blocks."""
        return self.besides + self.heads * self.beside_block


def sizes_of(heads: int, D: int) -> EncoderHeadSizes:
    """Returns the block sizes of `heads` heads of D columns."""
    main = 1 << (D.bit_length() - 1)
    rest = D - main
    return EncoderHeadSizes(
        heads=heads,
        main=main,
        rest=rest,
        main_block=max(16, main),  # of fewer a matrix unit takes none
        rest_block=_block_of(rest) if rest else 0,
        beside_block=_block_of(rest + 1),
    )


def _block_of(columns: int) -> int:
    """Returns the smallest power of two that holds the columns and that tensor cores accept."""
    return max(16, 1 << (columns - 1).bit_length())

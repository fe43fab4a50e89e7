"""Column-block layout of vision encoder heads, as plain data for both backends."""

from typing import NamedTuple


class EncoderHeadSizes(NamedTuple):
    """Sizes of an attention head and of its column blocks, which are powers of two.

    Attributes:
      heads: Number of heads.
      main, rest: Columns of a head in its first and its second block; the rest may be 0.
      main_block: Columns of the first block; columns after `main` are padding of zeros.
      rest_block: Same for the second block of queries and keys; 0 without a rest.
      beside_block: Same for the second block of values, in which a column of ones follows the rest.
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
        main_block=max(16, main),  # tensor cores require at least 16 columns
        rest_block=_block_of(rest) if rest else 0,
        beside_block=_block_of(rest + 1),
    )


def _block_of(columns: int) -> int:
    """Returns the smallest power of two that holds the columns and that tensor cores accept."""
    return max(16, 1 << (columns - 1).bit_length())

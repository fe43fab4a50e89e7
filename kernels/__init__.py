"""GPU kernels, one file per op and language; they import their framework, tiles and orders.

The two languages give the same bits where these are equal in both files of an op:

- what is given: the parameters of the functions, and the order of `shared.spec.reduction_order`,
which
  `ops` passes in;
- the order inside a tile: which product comes first, what is scaled before and what after it, and
  where a value is rounded to the type of its memory;
- sums over lanes: by the matrix unit, of whole numbers, of two floats at a time, or of one beside
  zeros, never of more floats by a reduction, whose order follows the warps;
- sums of products of the matrix unit: written as sums, from which the compiler makes one chain;
- logarithms: those of `noise`, never a library's;
- the constants (`LOG2_E`, `NEGATIVE`) and `exp2`, never `exp`;
- the compiler: products in float32 stay float32 (`HIGHEST`, `ieee`), and Triton is kept from fusing
  a product with a sum, which XLA's Triton does not do;
- sums of codes of FP8: by the matrix unit on the codes, a block of 128 from zero, and one fused
  multiply and add.

The tiles need not be equal: see `kernels/tiles.py`. A change to one file is a change to both. One
op has a second kernel in Pallas, for Mosaic GPU: `pallas_gpu/linear_described.py` does what the
branch with descriptors of `triton_gpu/linear.py` does, and `triton_gpu/linear_described.py` in
tiles of 192 columns. `mix` has one in both languages, `mix_described`. Mosaic's own division and
powers of two are not Triton's.
"""

"""GPU kernels, one file per operation and language: `pallas_gpu` and `triton_gpu`.

Kernels import their framework, tile configs and reduction orders. The two languages give the same
bits if the two files of an operation (twins) have equal:

- inputs: the parameters of the functions, and the orders of `shared.spec.reduction_order`, which
  `ops` passes in;
- order inside a tile: the order of products, factors before and after them, and the places where a
  value is rounded to the type of its memory;
- sums over lanes: on tensor cores, of integers, of two floats, or of one float and zeros. A
  reduction of more floats is never used, because its order depends on the warps;
- sums of tensor core products: written as sums, which the compiler joins into one chain;
- logarithms: from `gumbel_noise`, never from a library;
- constants (`LOG2_E`, `NEGATIVE`) and `exp2`, never `exp`;
- compiler options: float32 products stay float32 (`HIGHEST`, `ieee`), and multiply-add fusion is
  off in Triton, because XLA's Triton does not fuse;
- sums of FP8 products: on FP8 tensor cores, each block of 128 from zero, then one fused
  multiply-add;
- order of inputs inside an instruction: no operand of HMMA depends on a load of bytes, for which
  Triton changes the order;
- atomics: of scalars, because Pallas adds arrays of integers as if they were floats.

Tile configs need not be equal, see `kernels/tiles.py`. A change to one twin is a change to both.

Operations with WGMMA and TMA have second kernels, in modules that end in `_sm90`: for Mosaic GPU
in Pallas, in Gluon beside Triton. `pallas_gpu/gemm/linear_sm90.py` does the work of the TMA path of
`triton_gpu/gemm/linear.py`; `triton_gpu/gemm/linear_sm90.py` has tiles of 192 columns. Division and
powers of two of Mosaic GPU have other bits than Triton's, so `pallas_gpu/gemm/ptx.py` replaces
them.
"""

"""GPU kernels, one file per op and framework; they import their framework and nothing of ours."""

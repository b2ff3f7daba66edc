"""The kernels in Triton, for machines on which CUDA source cannot be compiled."""

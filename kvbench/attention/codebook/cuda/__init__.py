"""The kernel in CUDA: its source, and the code that compiles and launches it."""

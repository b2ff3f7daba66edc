"""The Triton decode kernel, which reads all storage formats of a layer in one launch."""

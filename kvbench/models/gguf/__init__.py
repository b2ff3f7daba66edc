"""Models from GGUF files: bounded reading of their headers, and conversion to a checkpoint in float32."""

"""Models on several devices: tensor parallelism over processes, and layers spread over the GPUs of one process."""

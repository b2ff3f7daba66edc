"""One attention function and one mask function for all Hugging Face models, reading the stores."""

"""Cache formats of inference engines: vLLM, SGLang, llama.cpp, and formats that they share; one family per file."""

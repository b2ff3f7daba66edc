"""A model behind an OpenAI-compatible server: engines and their commands, the server's life, requests, proof of dtype."""

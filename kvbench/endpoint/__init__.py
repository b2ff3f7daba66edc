"""A model behind an OpenAI-compatible server: engines, the server's life, requests, proof of its dtype."""

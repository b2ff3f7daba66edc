"""QuantSpec's claims on what this repository can run: losslessness, and acceptance by draft."""

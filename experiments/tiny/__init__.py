"""The bundled model `tiny`: its corpus, tokenizer, training mix, trainer and evaluation."""

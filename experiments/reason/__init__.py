"""What formats cost in answers of thousands of tokens: a small model on the data set `reason`."""

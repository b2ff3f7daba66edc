"""Attention over a kvbench cache: one attention function and one mask function for every Hugging Face model.

Shapes in this package: B rows of the batch, Hq query heads, H KV heads, q new tokens, n cached tokens, T tokens of the
prompt so far; D channels of a query or key, Dv channels of a value. *Query rows* of a KV head are the queries that read
it: one for each of its query heads and each new token.
"""

"""Attention over a kvbench cache: one attention function and one mask function for every Hugging Face model.

Shapes in this package: B rows of the batch, Hq query heads, H KV heads, q new tokens, n cached tokens, T tokens of the
prompt so far; D channels of a query or key, Dv channels of a value. *Query rows* of a KV head are the queries that read
it: one for each of its query heads and each new token.

Arguments that mean the same everywhere are described only here:

- `layer`: the layer whose stores hold the keys and values, those of the new tokens included unless it says otherwise;
- `rows`: rows of the batch with equal numbers of tokens in every segment;
- `query`: queries of the new tokens, ``[B, Hq, q, D]``; `keys` and `values` beside it: ``[B, H, n, D]`` and
  ``[B, H, n, Dv]``;
- `mask`: bool, True where visible, or additive, ``[B or 1, 1, q, kv]``, where kv counts all tokens seen so far,
  including padding and dropped tokens; None for causal attention;
- `scaling`: factor by which scores are multiplied; None, where it may be, for 1/sqrt(D);
- `logits`: the model's softcap and sinks (:mod:`kvbench.attention.logits`);
- `module`, `kwargs`: the model's attention module, and the other arguments of transformers' attention interface;
- `work`: the layer's stored keys and values as kernels read them (:class:`kvbench.attention.work.Work`).

The output of attention is ``[B, q, Hq, Dv]`` in the dtype of the queries.
"""

"""llama.cpp in a process of its own: reads requests as lines of JSON, writes logits to files, answers with a line.

This file is a program for the Python that has llama-cpp-python, which need not be the one that has kvbench; it imports
nothing of this repository. A request names a GGUF ``file``, a cache ``type``, token ``ids``, the ``first`` position
whose logits are wanted, and where to write them (``out``, an ``.npy`` file).
"""

import ctypes
import json
import sys
import time

#: numbers of ggml's types, from ``ggml.h``
TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}


def main() -> None:
    """Answer requests until standard input ends."""
    import llama_cpp as llama
    import numpy

    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    models, contexts = {}, {}
    print(json.dumps({"version": llama.__version__, "system": llama.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        ids, file, began = wanted["ids"], wanted["file"], time.process_time()
        if file not in models:
            models[file] = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
            if not models[file]:
                raise SystemExit(f"llama.cpp cannot load {file}")
        key = file, wanted["type"], len(ids)
        if key not in contexts:
            options = llama.llama_context_default_params()
            options.n_ctx = options.n_batch = options.n_ubatch = len(ids)
            options.n_threads = options.n_threads_batch = wanted["threads"]
            options.type_k = options.type_v = TYPES[wanted["type"]]
            options.flash_attn_type = 1
            contexts[key] = llama.llama_init_from_model(models[file], options)
        context = contexts[key]
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= wanted["first"]
        if llama.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp could not decode {len(ids)} tokens with {wanted['type']}")
        llama.llama_batch_free(batch)
        shape = len(ids) - wanted["first"], llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(models[file]))
        numpy.save(wanted["out"], numpy.ctypeslib.as_array(llama.llama_get_logits(context), shape=shape))
        print(json.dumps({"out": wanted["out"], "seconds": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main()

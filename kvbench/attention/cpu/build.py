import ctypes, os, types, torch, re
def missing(): return None
def library(capability=None):
    c=capability or os.environ.get("KVX","avx512")
    if c not in _l:
        lib=ctypes.CDLL(f"/tmp/cpux/{c}.so")
        path=next(l.split()[-1] for l in open("/proc/self/maps") if re.search("gomp|iomp",l))
        g=ctypes.CDLL(path)
        _l[c]=types.SimpleNamespace(decode=lib.kvbench_decode, parallel=ctypes.cast(g.GOMP_parallel,ctypes.c_void_p).value)
    return _l[c]
_l={}

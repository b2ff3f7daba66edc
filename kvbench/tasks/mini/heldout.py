"""Names of the files of Python's standard library that were kept out of the bundled model's training data."""

from __future__ import annotations

#: modules of the standard library, paths below ``Lib``; all are in Python 3.11 to 3.14 (``string`` is a package there)
MODULES = tuple(
    f"{name}.py"
    for name in """
argparse ast base64 bisect calendar cmd codecs collections/__init__ configparser contextlib copy csv dataclasses difflib
dis doctest enum fileinput fnmatch fractions ftplib functools getopt glob gzip hashlib heapq html/parser http/client
inspect ipaddress json/decoder json/encoder linecache locale mailbox mimetypes netrc optparse pdb pickle platform
plistlib poplib pprint queue random sched selectors shelve shlex shutil smtplib socketserver statistics string
subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback turtle uuid weakref zipapp
""".split()
)

#: the help texts of Python's keywords and types, plain English with some code
TOPICS = "pydoc_data/topics.py"

#: files that the training corpus must not contain
EXCLUDED = frozenset((*MODULES, TOPICS))

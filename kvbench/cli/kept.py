"""``python -m kvbench.fetch --list`` and ``--remove``: models and encoders in kvbench's own folder.

The folder has models converted from GGUF files, GGUF files that came in Python packages, and encoders that came in
Python packages. Files from the hub are in the hub's cache, which ``hf cache`` lists and prunes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import ConfigError, ModelError
from kvbench.hub.transfer import amount
from kvbench.models.gguf.packaged import remove
from kvbench.models.gguf.place import ENDING, models_folder, record
from kvbench.retrieval.packaged import encoders_folder
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.fingerprint import cache_folder


@dataclass(frozen=True)
class Kept:
    """A folder or file that was fetched or converted.

    Args:
        name: what ``--remove`` calls it: the preset, the encoder, or the name of the folder or file.
        what: description of it.
    """

    name: str
    what: str
    path: Path

    @property
    def bytes(self) -> int:
        """Size of the file, or of all files in the folder."""
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


def main(arguments: Sequence[str]) -> int:
    """List the folder's entries (``--list``) or remove some (``--remove NAME``), and return the exit status.

    Raises:
        ConfigError: the arguments are neither ``--list`` alone nor ``--remove`` and names of entries.
        ModelError: an entry cannot be removed.
    """
    there = list(kept())
    if list(arguments) == ["--list"]:
        for entry in there:
            print(f"{entry.name}: {entry.what}, {amount(entry.bytes)}, {entry.path}")
        total = sum(entry.bytes for entry in there)
        print(f"{amount(total)} in {cache_folder()}; what came from the hub: hf cache ls")
        return 0
    names = [text for text in arguments if text != "--remove"]
    if "--list" in names or not names or arguments[0] != "--remove":
        hint = "type --list, or --remove NAME with names that --list shows"
        raise ConfigError(" ".join(arguments), None, "does not say what to list or remove", hint=hint)
    for name in names:
        entries = [entry for entry in there if entry.name == name.removeprefix("model=")]
        if not entries:
            raise ConfigError("--remove", name, "is not there", allowed=sorted({entry.name for entry in there}))
        for entry in entries:
            size = entry.bytes
            try:
                remove(entry.path)
            except OSError as error:
                raise ModelError(f"{entry.path} cannot be removed: {error.strerror or error}") from error
            print(f"removed {entry.name}: {entry.what}, {amount(size)}")
    return 0


def kept() -> Iterator[Kept]:
    """Yield everything that is in kvbench's own folder, models first."""
    presets, files = {}, {}
    for name, path in group_options("model").items():
        package = read_choice(path).get("package")
        if package:
            presets[package["sha256"]], files[package["member"].rpartition("/")[2]] = name, name
    for path in sorted(models_folder().glob("*")):
        known = record(path) if path.is_dir() else None
        if known is not None:
            weights = "weights dequantized to float32" if known["quantized"] else "weights"
            what = f"{known.get('name') or 'model'}, {weights} of a GGUF file ({known['form']})"
            yield Kept(presets.get(known["sha256"], path.name), what, path)
        elif path.name.endswith(ENDING) and not path.name.startswith("."):
            yield Kept(files.get(path.name, path.name), "GGUF file of a package", path)
    for path in sorted(encoders_folder().glob("*")):
        if path.is_dir() and not path.name.startswith("."):
            yield Kept(path.name.rpartition("-")[0], "encoder of a package", path)

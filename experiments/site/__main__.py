"""``python -m experiments.site``: the documentation as a site, in build/site. Needs the extra ``docs``.

Every page of docs/ must be in the navigation of mkdocs.yml, every link must lead somewhere, and every module whose
docstrings are shown must exist: otherwise the command fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from experiments.site.tree import ROOT, collect
from kvbench.errors import KvbenchError
from kvbench.util.requirements import installed

BUILD, CONFIG = ROOT / "build", ROOT / "mkdocs.yml"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages and build the site; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.site", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=BUILD, metavar="DIR", help="folder of pages/ and site/ (build)")
    parser.add_argument("--serve", action="store_true", help="show the site at http://localhost:8000 instead")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output.resolve()
    config = stage(output)
    if not installed("zensical"):
        raise KvbenchError("building the site needs Zensical.\n  hint: pip install -c constraints.txt 'kvbench[docs]'")
    command = [sys.executable, "-m", "zensical", "serve" if arguments.serve else "build", "--config-file", str(config)]
    if arguments.serve:
        return serve(command, output)
    status = subprocess.run([*command, "--strict", "--clean"], cwd=ROOT).returncode
    if status == 0:
        print(f"the site is {output / 'site' / 'index.html'}")
    return status


def serve(command: Sequence[str], output: Path) -> int:
    """Run Zensical's server until it ends, and stage the pages again whenever a page or a configuration changes."""
    watched = newest()
    with subprocess.Popen(command, cwd=ROOT) as server:
        try:
            while server.poll() is None:
                time.sleep(1)
                if newest() > watched:
                    watched = newest()
                    try:
                        stage(output)
                    except KvbenchError as error:  # a page that is half written
                        print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            server.terminate()
    return server.returncode or 0


def newest() -> float:
    """Return when a page or a configuration was last changed, in seconds since 1970."""
    paths = [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*"), *(ROOT / "conf").rglob("*.yaml")]
    return max(path.stat().st_mtime for path in paths)


def stage(output: Path) -> Path:
    """Write all pages into ``output/pages``, and a complete configuration; return the path of the latter.

    Raises:
        KvbenchError: a page is not in the navigation.
    """
    tree, config = collect(), yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    wrong = list(tree.problems(config["nav"]))
    if wrong:
        raise KvbenchError("the documentation has mistakes:\n  " + "\n  ".join(wrong))
    tree.write(output / "pages")
    config |= {"docs_dir": "pages", "site_dir": "site", "nav": tree.navigation(config["nav"])}
    path = output / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error

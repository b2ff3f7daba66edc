"""Downloads into the hub's cache, with checks before and verification after; failures are raised as HubError.

A single request with a time limit checks a file on the hub; the hub's own client would retry for a minute.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbench.hub.repository import HubError, Repository, commit_of, note, settle, verify

#: time limit in seconds of the request, name resolution included
PROBE_SECONDS = 1.5


@dataclass(frozen=True)
class Answer:
    """The hub's answer to the question whether a repository has a file.

    Args:
        status: HTTP status, below 500; None if the hub did not answer or reported an error of its own.
        problem: why there is no usable answer; empty if there is one.
        commit: commit to which the revision refers; None if unknown.
        size: size of the file in bytes; None if unknown.
    """

    status: int | None = None
    problem: str = ""
    commit: str | None = None
    size: int | None = None


def ask(repository: Repository, name: str) -> Answer:
    """Ask the hub whether a repository has a file, and return the answer; failures are part of the answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Answer(problem="HF_HUB_OFFLINE is set")
    answers: list[Answer] = []
    # A thread, because name resolution has no timeout.
    thread = threading.Thread(target=lambda: answers.append(_request(repository.url(name))), daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    answer = answers[0] if answers else Answer(problem=f"no answer in {PROBE_SECONDS} s")
    if answer.problem:
        return Answer(problem=f"{constants.ENDPOINT} cannot be reached ({answer.problem})")
    if answer.status is not None and answer.status >= 500:
        return Answer(problem=f"{constants.ENDPOINT} responded with status {answer.status}")
    return answer


def demand(repository: Repository, name: str, *, only_repository: bool = False) -> Answer:
    """Ask the hub for commit and size of a file, and return its answer; raise HubError if the file is unavailable.

    With `only_repository`, the file need not exist if the hub has the repository at this revision.

    Raises:
        HubError: the hub cannot be reached, refuses this account, or does not have the file.
    """
    answer = ask(repository, name)
    if answer.problem:
        raise HubError(answer.problem, absent=True)
    if answer.status in (401, 403):
        raise refused(repository, answer.status)
    if answer.status == 404 and not (only_repository and answer.commit):
        raise HubError(f"the hub does not have this file at revision {repository.asked} (404)", absent=True)
    return answer


def refused(repository: Repository, status: int) -> HubError:
    """Return the error to raise if the hub denies this account access to a repository with an HTTP status."""
    page = "datasets/" * (repository.kind == "dataset") + repository.hub_id
    return HubError(
        f"the hub denied access to this account ({status}): the repository is gated or private, or does not exist",
        f"ask for access at https://huggingface.co/{page}, then run `hf auth login` or set HF_TOKEN",
        absent=True,
    )


def _request(url: str) -> Answer:
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError

    try:
        metadata = get_hf_file_metadata(url, timeout=PROBE_SECONDS)
    except HfHubHTTPError as error:
        return Answer(status=error.response.status_code, commit=error.response.headers.get("X-Repo-Commit"))
    except Exception as error:  # whatever goes wrong on the way is the answer
        text = str(error).strip().splitlines()
        return Answer(problem=": ".join([type(error).__name__, *text[:1]]))
    return Answer(status=200, commit=metadata.commit_hash, size=metadata.size)


#: remedy after a download that ended early
AGAIN = "run the same command again; it downloads only the files that are not complete"


@dataclass(frozen=True)
class Plan:
    """The files that a download needs, the missing ones among them, and the sizes of both in bytes."""

    files: tuple[str, ...]
    missing: tuple[str, ...]
    total: int
    missing_bytes: int


def plan(repository: Repository, wanted: Callable[[Sequence[str]], Sequence[str]], probe: str) -> Plan:
    """Ask the hub which files of a repository must be downloaded, and return them with their sizes.

    Args:
        wanted: function that takes the names of all files of the repository and returns those to download.
        probe: name of a file that most repositories have. It is requested first, to check that the hub grants access.

    Raises:
        HubError: the hub cannot be reached, refuses this account, does not have the repository or revision, or the
            revision no longer refers to the commit of the first download.
    """
    settle(repository, demand(repository, probe, only_repository=True).commit, "the hub")
    with _translated(repository):
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        tree = HfApi().list_repo_tree(
            repository.hub_id, recursive=True, revision=repository.revision, repo_type=repository.kind
        )
        sizes = {entry.path: int(entry.size or 0) for entry in tree if isinstance(entry, RepoFile)}
    files = tuple(wanted(sorted(sizes)))
    missing = tuple(name for name in files if repository.cached(name) is None)
    return Plan(files, missing, sum(map(sizes.__getitem__, files)), sum(map(sizes.__getitem__, missing)))


def fetch(repository: Repository, files: Plan) -> Path:
    """Download the missing files of a plan, verify and record them, and return their folder in the hub's cache.

    Raises:
        HubError: the disk has too little room, the download ended early, or the checksum of a file differs from the
            hub's. Files that are complete are kept.
    """
    if not files.files:
        raise HubError(
            f"{repository.hub_id} does not contain any of the files that are needed", "choose a different repository"
        )
    check_space(repository, files.missing_bytes)
    with _translated(repository):
        from huggingface_hub import snapshot_download

        patterns = [name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]") for name in files.files]
        folder = Path(
            snapshot_download(
                repository.hub_id, repo_type=repository.kind, revision=repository.revision, allow_patterns=patterns
            )
        )
        for name in files.missing:
            verify(folder / name)
    settle(repository, commit_of(folder / "file"), "the hub")
    note(repository, ((name, folder / name) for name in files.files))
    return folder


def fetch_file(repository: Repository, name: str) -> Path:
    """Download one file into the hub's cache, verify and record it, and return its path.

    Raises:
        HubError: the hub cannot be reached, refuses this account or does not have the file; the revision no longer
            refers to the commit of the first download; the disk is full; the download ended early; or the checksum is
            wrong.
    """
    answer = demand(repository, name)
    settle(repository, answer.commit, "the hub")
    check_space(repository, answer.size or 0)
    with _translated(repository):
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(repository.hub_id, name, repo_type=repository.kind, revision=repository.revision))
        verify(file)
    settle(repository, commit_of(file), "the hub")
    note(repository, [(name, file)])
    return file


def check_space(repository: Repository, size: int) -> None:
    """Raise HubError if the disk with the hub's cache has less than `size` bytes of free space."""
    place = next(folder for folder in (repository.folder, *repository.folder.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        raise _full(repository, f"needs {amount(size)}, but only {amount(free)} are free; nothing was downloaded")


def amount(size: float) -> str:
    """Return a number of bytes as readable text, for example ``512 B``, ``1.5 MB`` or ``13.5 GB``."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _full(repository: Repository, problem: str) -> HubError:
    return HubError(
        f"{repository.hub_id} does not fit into {repository.folder.parent}: it {problem}",
        "free some space there, or set HF_HOME=FOLDER on a larger disk for this command and for the runs",
    )


@contextmanager
def _translated(repository: Repository) -> Iterator[None]:
    """Turn the errors of the hub's client, whose kinds change with its version, into HubError."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        root: BaseException | None = error
        while root is not None and not (isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT)):
            root = root.__cause__ or root.__context__
        if root is not None:
            raise _full(repository, "filled the disk; complete files are kept") from error
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise refused(repository, status) from error
        lines = str(error).strip().splitlines()
        reason = ": ".join([type(error).__name__, *(line.rstrip(".") for line in lines[:1])])
        raise HubError(f"the download of {repository.hub_id} stopped early ({reason})", AGAIN) from error

"""A single request with a time limit that checks a file on the hub; the hub's own client would retry for a minute."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvbench.hub.repository import HubError, Repository

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

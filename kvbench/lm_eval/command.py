"""lm-eval's own command line with the model ``kvbench``, a request cache per setting, and rows stored for kvbench."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, KvbenchError
from kvbench.lm_eval.rows import Logs
from kvbench.util.door import reporting

#: folder in which lm-eval writes its results where no other is named; they are read back from there
OUTPUT = "results/lm_eval"
#: model arguments that do not change an answer
RUNNING = frozenset(("results_dir", "batch_size", "max_batch_size"))
#: model arguments that are lm-eval's own, and change what the model reads or how its answers are cut
HOST = frozenset(("add_bos_token", "prefix_token_id", "chat_template_args", "enable_thinking", "think_end_token"))

_USAGE = """python -m kvbench.lm_eval: lm-evaluation-harness through kvbench's caches

  python -m kvbench.lm_eval run --model kvbench --model_args model=llama2-7b,setting=kivi:int4 --tasks gsm8k
      lm-eval's own command line (lm-eval run --help); its tasks, prompts and metrics
  python -m kvbench.lm_eval ls tasks
      lm-eval's tasks

--model_args: model=NAME (a preset, a repository or a folder), setting=METHOD[:QUANTIZER][:KEY=VALUE]..., and dtype,
device, max_length, revision, prefill_chunk, graphs, compile, seed; results_dir=DIR for the rows (none: do not store
them). Likelihoods go through the cache after an exact prefill of the context, one token at a time.
"""


@reporting("interrupted; with --use_cache FILE, the same command goes on where this one stopped")
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.lm_eval`` and return the exit status; print errors to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    _require()
    return _run_lm_eval(arguments)


def _require() -> None:
    """Raise KvbenchError if lm-eval is not installed."""
    try:
        version("lm-eval")
    except PackageNotFoundError:
        raise KvbenchError(
            "python -m kvbench.lm_eval needs the package 'lm-eval'.\n  hint: run pip install 'kvbench[lm-eval]'"
        ) from None


def _run_lm_eval(arguments: list[str]) -> int:
    """Run lm-eval's command line, then store kvbench's rows of the evaluation; return the exit status."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from kvbench.lm_eval.model import CachedLM

    setup_logging()
    before, sys.argv = sys.argv, ["lm-eval", *arguments]  # lm-eval's parser reads them there
    try:
        parser = HarnessCLI()
        parsed = parser.parse_args()
    except SystemExit as end:  # argparse has printed why
        return end.code if isinstance(end.code, int) else 1
    finally:
        sys.argv = before
    given = lm_eval_options(parsed)
    ours = parsed.command == "run" and given.get("model") == "kvbench"
    if ours:
        prepare_request_cache(parsed, given)
    CachedLM.last, logs = None, Logs(Path(str(getattr(parsed, "output_path", None) or OUTPUT)))
    try:
        parser.execute(parsed)
    except SystemExit as end:
        if end.code not in (None, 0):
            return end.code if isinstance(end.code, int) else 1
    if ours and CachedLM.last is not None:
        _report(CachedLM.last, logs)
    return 0


def _report(model: Any, logs: Logs) -> None:
    """Print how many requests tested the setting, and store the rows of this evaluation."""
    from kvbench.lm_eval.rows import store
    from kvbench.results.identity import short_name

    print(model.figures.summary(short_name(model.chosen.plain)), file=sys.stderr)
    folder = model.results_dir or "results/runs"
    if folder != "none":
        run = store(logs, model, Path(folder))
        print(f"rows: {run}  (python -m kvbench.report)" if run else "rows: none, as no task has scores per sample")


def lm_eval_options(parsed: Namespace) -> dict[str, Any]:
    """Return the options as lm-eval will read them: the file of ``--config``, overridden by the command line."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    given: dict[str, Any] = {}
    if getattr(parsed, "config", None):
        try:
            given |= EvaluatorConfig.load_yaml_config(parsed.config)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError("--config", parsed.config, f"cannot be read: {error}") from error
    return given | {key: value for key, value in vars(parsed).items() if value or value == 0}


def prepare_request_cache(parsed: Namespace, given: Mapping[str, Any]) -> None:
    """Add a request cache that only this setting uses, and a log of all samples, to a parsed command line in place.

    lm-eval looks up answers by the request alone, so one file for several settings would give all of them the answers
    of the first. The key of model and setting (:func:`kvbench.lm_eval.chosen.setting_key`) is therefore appended to the
    file's name. `given` are all options (:func:`lm_eval_options`).

    Raises:
        ConfigError: the model arguments are invalid.
    """
    from lm_eval.utils import simple_parse_args_string

    from kvbench.lm_eval.chosen import choose, setting_key

    arguments = given.get("model_args") or {}
    if isinstance(arguments, str):  # in a file of --config
        arguments = simple_parse_args_string(arguments)
    if not isinstance(arguments, Mapping):
        raise ConfigError("--model_args", arguments, "must be KEY=VALUE", hint="model=llama2-7b,setting=kivi:int4")
    chosen = choose({key: value for key, value in arguments.items() if key not in RUNNING | HOST})
    if given.get("use_cache"):
        host = {key: value for key, value in arguments.items() if key in HOST and value is not None}
        parsed.use_cache = f"{given['use_cache']}-{setting_key(chosen, host)}"
    parsed.output_path = given.get("output_path") or OUTPUT
    parsed.log_samples = True

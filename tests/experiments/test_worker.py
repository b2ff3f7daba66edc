"""Records of the worker on several GPUs: its file as it grows, and the peaks of each device."""

from __future__ import annotations

import json

import torch

from experiments.multigpu.worker import EQUAL, GRAPHS, LAYOUTS, LONG, Peaks, Record, mine
from kvbench.config.setting import parse_setting


def test_the_file_is_whole_after_every_measurement(tmp_path, capsys):
    record = Record(tmp_path / "one.json")
    for part, name, value in (("a", "x", 1), ("b", "x", 2), ("a", "y", [3])):
        record.add(part, name, value)
        assert json.loads((tmp_path / "one.json").read_text()) == record.content
    assert record.content == {"a": {"x": 1, "y": [3]}, "b": {"x": 2}}
    assert capsys.readouterr().out.splitlines()[2].endswith("s  a: y")


def test_peaks_are_those_of_decoding_on_each_device(monkeypatch):
    devices, resets = [torch.device("cuda:0"), torch.device("cuda:1")], []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 * (device.index + 1) + len(resets))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: resets.append(device.index))
    peaks = Peaks(devices)
    for name in ("prefill", "decode"):
        peaks.phase(name)
    assert peaks.decode == [0, 0] and resets == [0, 1, 0, 1]
    peaks.phase("end")
    assert peaks.decode == [14, 25]


def test_devices_of_a_model_are_named_once():
    class Held:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))

    assert mine(Held()) == [torch.device("cpu"), torch.device("meta")]


def test_every_setting_of_the_worker_can_run():
    for text in {*EQUAL.values(), *LONG.values()}:
        parse_setting(text).load()
    assert set(GRAPHS) == set(LAYOUTS) and "always" not in GRAPHS["device_map"]

"""The server shows the page on this machine only, and follows runs as they go."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager

import pytest

from experiments.page.made import metrics, row, run_id, write_made_run
from kvbench.cli import report
from kvbench.cli.report_page import reader
from kvbench.errors import KvbenchError
from kvbench.page.data import Report
from kvbench.page.server import PORT, Server, _Handler
from kvbench.results.store import find_runs
from tests.page.report_support import data_of


@contextmanager
def serving(folder, **more):
    shown = Report(lambda: find_runs(folder), reader(), folder, folder / "none", **more)
    with Server(shown, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_the_page_follows_a_run_as_it_goes(tmp_path):
    rows = [row(index, 1.0) for index in range(4)]
    store = write_made_run(tmp_path, 1, rows=rows[:2], unfinished=True)
    with serving(tmp_path) as server:
        assert server.address == f"http://127.0.0.1:{server.server_port}/"
        status, _, page = get(server, "/")
        assert status == 200 and data_of(page.decode())["runs"][0]["done"] == 2
        assert b'data-live="true"' in page and b"connect-src 'self'" in page
        _, headers, _ = get(server, "/data.json")
        mark = headers["X-Mark"]
        assert get(server, f"/data.json?mark={mark}")[0] == 204
        store.append(rows[2:3])
        status, headers, body = get(server, f"/data.json?mark={mark}")
        assert (status, json.loads(body)["runs"][0]["done"]) == (200, 3) and headers["X-Mark"] != mark
        settings = store.config()
        store.append(rows[3:])
        store.write_metrics(metrics(store.run_id, settings, rows))
        write_made_run(tmp_path, 2)
        runs = {run["id"]: run for run in json.loads(get(server, "/data.json")[2])["runs"]}
        assert runs[run_id(1)]["done"] == 4 and runs[run_id(1)]["status"] != "unfinished" and len(runs) == 2


def test_other_names_and_paths_are_refused(tmp_path):
    write_made_run(tmp_path, 1)
    with serving(tmp_path) as server:
        port = server.server_port
        assert get(server, "/", Host=f"evil.example:{port}")[0] == 403
        assert get(server, "/data.json", Host="127.0.0.1")[0] == 403
        assert get(server, "/", Host=f"localhost:{port}")[0] == 200
        assert get(server, "/../samples.jsonl")[0] == 404
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_browsers_leave_out_port_80(tmp_path):
    write_made_run(tmp_path, 1)
    with serving(tmp_path) as server:
        address = server.server_address
        server.server_port = 80
        for host, status in (("127.0.0.1", 200), ("localhost", 200), ("evil.example", 403), ("127.0.0.1:81", 403)):
            connection = http.client.HTTPConnection(*address)
            connection.request("GET", "/data.json", headers={"Host": host})
            assert connection.getresponse().status == status
            connection.close()


def test_a_folder_without_runs_is_served(tmp_path):
    with serving(tmp_path / "later") as server:
        assert json.loads(get(server, "/data.json")[2])["runs"] == []
        write_made_run(tmp_path / "later", 1)
        assert len(json.loads(get(server, "/data.json")[2])["runs"]) == 1


def test_a_port_that_is_taken_is_said(tmp_path, capsys):
    write_made_run(tmp_path, 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert report.main(["--results", str(tmp_path), "--serve", str(port)]) == 1
        assert f"port {port} cannot be used" in capsys.readouterr().err
    with pytest.raises(KvbenchError, match=r"port 70000 cannot be used: .*65535\.\n"):
        Server(Report(list, reader(), tmp_path, tmp_path), 70000)


def test_a_client_that_leaves_early_is_no_error(tmp_path, capsys, monkeypatch):
    write_made_run(tmp_path, 1, rows=[row(index, 1.0) for index in range(4)])

    def closed(self, *given):
        raise BrokenPipeError

    with serving(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(_Handler, "_answer", closed)
            with pytest.raises((http.client.HTTPException, OSError)):
                get(server, "/")
        assert get(server, "/")[0] == 200
    assert capsys.readouterr().err == ""


def test_answers_say_what_they_are_and_are_not_kept(tmp_path):
    write_made_run(tmp_path, 1)
    with serving(tmp_path) as server:
        mark = get(server, "/data.json")[1]["X-Mark"]
        assert len(mark) == 16 and set(mark) <= set("0123456789abcdef")
        kinds = {"/": "text/html", "/data.json": "application/json", "/other": "text/plain"}
        for path, kind in kinds.items():
            _, headers, body = get(server, path)
            assert headers["Content-Type"] == f"{kind}; charset=utf-8" and headers["Content-Length"] == str(len(body))
            assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
            assert headers["X-Mark"] == (None if path == "/other" else mark)
        status, headers, body = get(server, f"/data.json?mark={mark}")
        assert (status, body, headers["Content-Length"], headers["X-Mark"]) == (204, b"", None, mark)
        assert headers["Content-Type"].startswith("application/json")
        assert [get(server, f"/?mark={mark}")[0], get(server, f"/data.json?mark={mark}0")[0]] == [200, 200]


def test_data_are_made_anew_only_after_a_change(tmp_path, monkeypatch):
    store, made = write_made_run(tmp_path, 1, rows=[row(0, 1.0)], unfinished=True), []
    really = Report.data
    monkeypatch.setattr(Report, "data", lambda self: made.append(1) or really(self))
    with serving(tmp_path) as server:
        marks = [get(server, "/data.json")[1]["X-Mark"] for _ in range(3)]
        assert len(set(marks)) == 1 and len(made) == 1
        store.append([row(1, 1.0)])
        assert get(server, "/data.json")[1]["X-Mark"] != marks[0] and len(made) == 2
        assert server.daemon_threads is True, "an open page does not hold up the end of the command"


def test_the_mark_does_not_change_with_the_hour(tmp_path, monkeypatch):
    really = Report.data
    hours = iter(range(24))
    monkeypatch.setattr(Report, "data", lambda self: {**really(self), "made": str(next(hours))})
    signatures = iter(range(24))
    monkeypatch.setattr(Report, "signature", lambda self: next(signatures))
    write_made_run(tmp_path, 1)
    with serving(tmp_path) as server:
        (one, first), (two, second) = server.current(), server.current()
        assert (one["made"], two["made"]) == ("0", "1") and first == second


def test_a_fault_is_shown_and_raised(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("half an emoji \ud83d")

    faults = []
    monkeypatch.setattr(Server, "handle_error", lambda self, request, address: faults.append(address))
    with serving(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Report, "data", broken)
            status, headers, body = get(server, "/")
        assert (status, body) == (500, b"RuntimeError: half an emoji ?\n") and "X-Mark" not in headers
        assert headers["Content-Type"].startswith("text/plain") and get(server, "/")[0] == 200
    assert len(faults) == 1


def test_the_default_port_is_the_documented_one(tmp_path):
    assert PORT == 8765 and Server.__init__.__defaults__ == (8765,)

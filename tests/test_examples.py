"""The examples do what they say, as they stand."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
import pytest

from pglease import PGLease
from tests.support.worlds import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def start(dsn):
    """Start an example as its first lines say."""
    running = []

    def begin(name, *arguments, **variables):
        process = subprocess.Popen(
            [sys.executable, "-u", EXAMPLES / f"{name}.py", *map(str, arguments)],
            env={**os.environ, "DATABASE_URL": dsn, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def outcome(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.fixture
def leases(dsn):
    with PGLease(dsn, owner_id="somebody-else") as client:
        yield client


def test_the_simple_demo_works_or_says_who_does(start, leases):
    first = start("simple_demo", 30)
    assert "fencing token is 1" in first.stdout.readline()

    assert "is at work; ask again in" in outcome(start("simple_demo", 0.1))[1]

    first.kill()
    assert leases.force_release("simple-demo", 1)
    assert outcome(start("simple_demo", 0.1))[1].endswith("done, and released\n")


def test_one_pod_leads_and_the_next_goes_on_when_it_stops(start):
    first = start("kubernetes_demo", 1000, 0.05, POD_NAME="pod-a")
    assert first.stdout.readline() == "pod-a leads\n"
    second = start("kubernetes_demo", 2, 0.05, POD_NAME="pod-b")
    assert first.stdout.readline().startswith("turn")

    first.send_signal(signal.SIGTERM)

    assert outcome(first)[0] == 0
    assert outcome(second)[1] == (
        "pod-b leads\nturn 0 under fencing token 2\nturn 1 under fencing token 2\npod-b stopped in order\n"
    )


def test_one_host_writes_the_report_and_the_others_find_it(start, tmp_path):
    report = tmp_path / "report.txt"
    hosts = [start("cron_report", report) for _ in range(3)]

    outcomes = [outcome(host) for host in hosts]

    assert [code for code, _, _ in outcomes] == [0, 0, 0]
    assert sorted(out.split()[0] for _, out, _ in outcomes) == ["another", "another", "written"]
    assert report.read_text().startswith("the report")
    assert list(tmp_path.iterdir()) == [report]


def test_a_report_that_another_host_is_at_for_too_long_is_75(start, leases, tmp_path):
    assert leases.try_acquire("report", ttl=60)

    code, _, err = outcome(start("cron_report", tmp_path / "report.txt", 0.5))

    assert (code, err) == (75, "somebody-else is still at it\n")


def test_one_replica_migrates_and_the_others_find_nothing_to_do(start, dsn):
    outcomes = [outcome(replica) for replica in [start("migration_guard") for _ in range(3)]]

    assert [code for code, _, _ in outcomes] == [0, 0, 0]
    assert sorted(out for _, out, _ in outcomes) == ["applied [1, 2]\n", "nothing to apply\n", "nothing to apply\n"]
    with psycopg.connect(dsn) as database:
        assert database.execute("SELECT count(*) FROM guarded_migrations").fetchone() == (2,)


def test_a_failed_migration_leaves_no_lease_behind(start, dsn, leases):
    with psycopg.connect(dsn) as database:
        database.execute("CREATE TABLE guarded_accounts (other int)")

    code, _, _ = outcome(start("migration_guard"))

    assert code != 0
    assert leases.try_acquire("migrations")


def test_a_migration_that_takes_too_long_elsewhere_has_an_end(start, leases):
    assert leases.try_acquire("migrations", ttl=60)

    code, _, err = outcome(start("migration_guard", 0.5))

    assert code == 1
    assert "somebody-else has been migrating" in err


def test_a_service_answers_409_to_a_holder_that_was_succeeded(start):
    code, out, err = outcome(start("fenced_service"))

    assert (code, err) == (0, "")
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["204", "204", "204", "409", "428", "three"]


def test_a_storage_with_conditional_writes_keeps_what_the_successor_wrote(start):
    code, out, err = outcome(start("fenced_storage"))

    assert (code, err) == (0, "")
    assert out == (
        "the first holder came back: token 2 has written since\nthe object is: {'fencing_token': 2, 'text': 'two'}\n"
    )


def test_of_the_replicas_of_a_django_project_one_migrates_and_one_writes_the_report(dsn, leases):
    def manage(*words):
        project = EXAMPLES / "django_project"
        environment = {**os.environ, "DATABASE_URL": dsn, "PYTHONPATH": str(EXAMPLES.parent)}
        return subprocess.Popen(
            [sys.executable, project / "manage.py", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    migrating = [manage("pglease_migrate", "--noinput", "--no-color") for _ in range(2)]
    ended = [process.communicate(timeout=120) for process in migrating]
    assert [process.returncode for process in migrating] == [0, 0], ended
    assert sum("Applying reports.0001_initial... OK" in out for out, _ in ended) == 1

    first = manage("report", "--takes", "0")
    assert first.communicate(timeout=120)[0] == "written under fencing token 1\n"
    assert leases.wait_for_lease("report", timeout=60)
    second = manage("report", "--takes", "0")
    assert second.communicate(timeout=120)[0] == "skipped: somebody-else is at it\n"


@pytest.fixture
def serve(dsn):
    """Start a web server on a free port; return the address it says it listens at."""
    running = []

    def begin(*command):
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command],
            env={**os.environ, "DATABASE_URL": dsn, "FLASK_PGLEASE_HEARTBEAT_INTERVAL": "0.2"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = ""
        while not (found := re.search(r"(?:running on|Listening at:) (http://\S+:\d+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        running.append((process, reader))
        return found[1]

    yield begin
    for process, _ in running:
        process.terminate()
    for process, reader in running:
        code = process.wait(60)
        reader.join(60)
        process.stderr.close()
        assert code in {0, -signal.SIGTERM}  # uvicorn tidies up, then ends by the signal


def post(url):
    try:
        with urlopen(Request(url, method="POST"), timeout=100) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers), None


def is_held(leases, name):
    lease = leases.get_lease(name)
    return lease is not None and not lease.is_expired()


def test_an_endpoint_of_fastapi_runs_once_at_a_time_for_each_tenant(serve, leases):
    address = serve("uvicorn", "--app-dir", str(EXAMPLES), "--port", "0", "fastapi_sync:app")
    assert leases.try_acquire("sync:acme", ttl=60)

    busy, headers, _ = post(f"{address}/sync/acme?seconds=0")
    assert (busy, 1 <= int(headers["retry-after"]) <= 60) == (423, True)
    assert post(f"{address}/sync/globex?seconds=0")[2] == {"synchronised": "globex", "under": 1}

    leases.release("sync:acme")
    assert post(f"{address}/sync/acme?seconds=0")[2] == {"synchronised": "acme", "under": 2}


def test_workers_that_gunicorn_forked_from_a_preloaded_flask_exclude_each_other(serve, leases):
    workers = ("--preload", "--workers", "2", "--timeout", "300", "--bind", "127.0.0.1:0")
    address = serve("gunicorn", "--chdir", str(EXAMPLES), *workers, "flask_shop:app")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, f"{address}/tasks/cleanup?seconds=60")
        wait_until(lambda: is_held(leases, "cleanup"))
        _, _, second = post(f"{address}/tasks/cleanup?seconds=0")
        assert leases.force_release("cleanup", 1)

        assert second["status"] == "skipped"
        assert first.result(100)[0] == 500  # a lost lease is no success
    assert post(f"{address}/tasks/cleanup?seconds=0")[2]["status"] == "completed"

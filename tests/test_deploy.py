"""What is in deploy/ is taken by the tool that would refuse it, and means what docs/operations.md says."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cronsim import CronSim
from lightkube import codecs

from pglease import PGLease
from pglease.cli.run import default_grace
from tests.support.shell import refusal_of_ours
from tests.support.worlds import execute

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
MANIFESTS = sorted((DEPLOY / "kubernetes").iterdir())
COMPOSE = DEPLOY / "compose" / "compose.yaml"
CRON = DEPLOY / "cron" / "pglease"


def title(path: Path) -> str:
    return path.name


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def cron_lines() -> list[str]:
    lines = [line for line in CRON.read_text().splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not re.match(r"\w+=", line)]


def containers(pod: Any) -> Iterator[dict[str, Any]]:
    """Every container of a manifest, wherever it is."""
    if isinstance(pod, dict):
        yield from pod.get("initContainers", []) + pod.get("containers", [])
        for part in pod.values():
            yield from containers(part)


def command_lines() -> dict[str, list[str]]:
    """Every command line of ours in deploy/, without the word `pglease`, by where it is."""
    found = {}
    for path in UNITS:
        if path.suffix == ".service":
            found[path.name] = shlex.split(unit(path)["Service"]["ExecStart"].replace("%H", "host"))[1:]
    for number, line in enumerate(cron_lines()):
        found[f"cron {number}"] = shlex.split(line.split(None, 6)[6].replace(r"\%", "%"))[1:]
    for path in MANIFESTS:
        for container in (each for document in documents(path) for each in containers(document)):
            if container.get("command", [""])[0] == "pglease":
                found[f"{path.name} {container['name']}"] = container["command"][1:] + container["args"]
            if "exec" in container.get("readinessProbe", {}):
                (_, _, script) = container["readinessProbe"]["exec"]["command"]
                found[f"{path.name} probe"] = shlex.split(script.removeprefix("exec pglease "))
    found["compose"] = documents(COMPOSE)[0]["services"]["worker"]["command"][1:]
    return found


COMMAND_LINES = command_lines()


@pytest.mark.parametrize("line", COMMAND_LINES.values(), ids=COMMAND_LINES)
def test_every_command_line_of_ours_is_one_that_pglease_takes(line: list[str]) -> None:
    assert refusal_of_ours(line) is None


def test_every_place_has_its_command_lines() -> None:
    assert len(COMMAND_LINES) == 3 + 4 + 4 + 1


# -- systemd


def verify(folder: Path) -> str:
    """What systemd has to say about the units in a folder, with programs that are there."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *folder.glob("*.service"), *folder.glob("*.timer")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr + (f"exit {done.returncode}" if done.returncode else "")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, where all that they start exists."""
    (tmp_path / "bin").mkdir()
    for program in ("pglease", "celery", "worker", "report"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    for path in UNITS:
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/app", str(tmp_path)))
    return tmp_path


@pytest.mark.needs("systemd")
def test_systemd_has_nothing_to_say_against_the_units(installed: Path) -> None:
    assert verify(installed) == ""


@pytest.mark.needs("systemd")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("SuccessExitStatus=75", "SuccesExitStatus=75"), ("SuccessExitStatus=75", "SuccessExitStatus=held")],
)
def test_systemd_would_say_it_if_there_was_something(installed: Path, right: str, wrong: str) -> None:
    report = installed / "report.service"
    report.write_text(report.read_text().replace(right, wrong))

    assert "report.service" in verify(installed)


def test_the_units_know_our_exit_codes() -> None:
    oneshot, daemon = (unit(DEPLOY / "systemd" / f"{name}.service")["Service"] for name in ("report", "worker"))

    assert (oneshot["Type"], oneshot["SuccessExitStatus"]) == ("oneshot", "75")
    assert (daemon["Type"], daemon["NotifyAccess"], daemon["Restart"]) == ("notify", "all", "always")
    assert daemon["RestartForceExitStatus"] == "75 76"
    assert unit(DEPLOY / "systemd" / "report.timer")["Timer"]["OnCalendar"]


def test_a_command_under_pglease_run_can_tell_systemd_that_it_is_ready(dsn: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        ready = "import os, socket; socket.socket(1, 2).sendto(b'READY=1', os.environ['NOTIFY_SOCKET'])"
        line = [*COMMAND_LINES["worker.service"][:-1], sys.executable, "-c", ready]

        done = subprocess.run(
            [sys.executable, "-m", "pglease", *line],
            env={"PATH": "/usr/bin:/bin", "PGLEASE_URL": dsn, "NOTIFY_SOCKET": str(tmp_path / "notify")},
            cwd=ROOT,
            timeout=120,
            check=False,
        )

        assert done.returncode == 0
        assert systemd.recv(100) == b"READY=1"


# -- cron


def test_cron_would_read_the_file_and_understand_its_lines() -> None:
    text = CRON.read_text()

    assert re.fullmatch(r"[\w-]+", CRON.name), "cron passes over names with other characters"
    assert text.endswith("\n"), "cron passes over a line without its end"
    for line in cron_lines():
        *when, user, command = line.split(None, 6)
        CronSim(" ".join(when[:5]), __import__("datetime").datetime(2026, 1, 1))
        assert (when[5:], user) == ([], "app")
        assert command.startswith("pglease ")
        assert not re.search(r"(?<!\\)%", command), "cron ends the command there"


def test_a_cron_line_runs_its_job_and_is_silent_where_another_host_has_it(dsn: str, tmp_path: Path) -> None:
    weekly = tmp_path / "weekly"
    weekly.write_text('#!/bin/sh\necho "$@" > "$0.ran"\n')
    weekly.chmod(0o755)
    pglease = tmp_path / "pglease"
    pglease.write_text(f'#!/bin/sh\nexec {sys.executable} -m pglease "$@"\n')
    pglease.chmod(0o755)
    (line,) = [each.split(None, 6)[6] for each in cron_lines() if "weekly" in each]
    command = line.replace(r"\%", "%").replace("/opt/app/bin", str(tmp_path)).replace("--min-hold 1h", "--min-hold 0")

    def cron() -> tuple[int, str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PGLEASE_URL": dsn, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    assert cron() == (0, "")
    assert re.fullmatch(r"--day \d{4}-\d\d-\d\d\n", (tmp_path / "weekly.ran").read_text())

    (tmp_path / "weekly.ran").unlink()
    with PGLease(dsn) as other:
        assert other.try_acquire("weekly")
        assert cron() == (0, "")
    assert not (tmp_path / "weekly.ran").exists()
    assert execute(dsn, "SELECT task_name FROM pglease_leases") == [("weekly",)]


# -- Kubernetes


def lost(given: Any, taken: Any, at: str = "") -> list[str]:
    """Which fields were given and not taken: a reader that knows all of Kubernetes drops what it does not know."""
    if isinstance(given, dict):
        return [
            place
            for key, value in given.items()
            for place in (
                lost(value, taken[key], f"{at}.{key}") if key in taken and taken[key] is not None else [f"{at}.{key}"]
            )
        ]
    if isinstance(given, list):
        return [place for n, each in enumerate(given) for place in lost(each, taken[n], f"{at}[{n}]")]
    return [] if given == taken else [at]


def schema_problems(text: str) -> list[str]:
    """Read manifests by the models of Kubernetes' own API."""
    read = codecs.load_all_yaml(text)
    given = list(yaml.safe_load_all(text))
    return [place for one, taken in zip(given, read, strict=True) for place in lost(one, taken.to_dict())]


@pytest.mark.parametrize("path", MANIFESTS, ids=title)
def test_every_field_of_a_manifest_is_one_of_kubernetes(path: Path) -> None:
    assert schema_problems(path.read_text()) == []


@pytest.mark.parametrize(("right", "wrong"), [("readinessProbe", "readynessProbe"), ("preStop", "prestop")])
def test_a_field_that_kubernetes_does_not_know_is_noticed(right: str, wrong: str) -> None:
    text = (DEPLOY / "kubernetes" / "leader.yaml").read_text().replace(f"{right}:", f"{wrong}:")

    (place,) = schema_problems(text)

    assert place.endswith(wrong)


def test_a_value_of_another_type_is_refused() -> None:
    text = (DEPLOY / "kubernetes" / "leader.yaml").read_text().replace("periodSeconds: 5", "periodSeconds: soon")

    with pytest.raises(Exception, match="Expected `int"):
        schema_problems(text)


@pytest.mark.needs("kubectl")
@pytest.mark.parametrize("name", ["leader.yaml", "migrate.yaml", "cronjob.yaml"])
def test_kubectl_takes_the_workloads_and_drops_nothing(name: str, tmp_path: Path) -> None:
    """Without a cluster, `--local`: it reads by the types that it was built with."""
    (workload, *_) = documents(DEPLOY / "kubernetes" / name)
    if workload["kind"] == "CronJob":  # of which Debian 12's kubectl knows no batch/v1
        job = workload["spec"]["jobTemplate"]
        workload = {"apiVersion": "batch/v1", "kind": "Job", "metadata": workload["metadata"], **job}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(workload))

    done = subprocess.run(
        ["kubectl", "set", "env", "--local", "--dry-run=client", "-o", "json", "-f", "one.yaml", "CHECKED=yes"],
        cwd=tmp_path,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "KUBECONFIG": "/dev/null", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert lost(workload, json.loads(done.stdout)) == []
    assert '"CHECKED"' in done.stdout


def test_the_leaders_pod_has_time_to_end_in_order_and_its_name_in_the_record() -> None:
    (deployment, _) = documents(DEPLOY / "kubernetes" / "leader.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (api,) = pod["containers"]
    ttl = float(api["command"][api["command"].index("--ttl") + 1].removesuffix("s"))
    (_, sleep) = api["lifecycle"]["preStop"]["exec"]["command"]

    assert pod["terminationGracePeriodSeconds"] > max(ttl, float(sleep) + default_grace(ttl))
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}, "a pod that stands by is never ready"
    assert "livenessProbe" not in api
    assert api["env"][0] == {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert '--owner "$POD_NAME"' in api["readinessProbe"]["exec"]["command"][2]


def test_the_rights_are_those_that_workers_need() -> None:
    (worker, *_) = documents(ROOT / "migrations" / "kubernetes" / "rbac.yaml")
    (account, role, binding) = documents(DEPLOY / "kubernetes" / "rbac.yaml")

    (rule,) = role["rules"]
    assert set(rule["verbs"]) == {verb for each in worker["rules"] for verb in each["verbs"]}
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


# -- compose


def compose_schema(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_compose_file_is_one_by_the_schema_of_compose(tmp_path: Path) -> None:
    assert compose_schema(COMPOSE).returncode == 0

    shutil.copy(COMPOSE, tmp_path)
    broken = tmp_path / COMPOSE.name
    broken.write_text(broken.read_text().replace("stop_grace_period", "stop_grace"))
    assert compose_schema(broken).returncode == 1


def test_every_secret_and_volume_of_the_compose_file_is_declared() -> None:
    (compose,) = documents(COMPOSE)
    used = {each for service in compose["services"].values() for each in service.get("secrets", [])}

    assert used == compose["secrets"].keys()
    assert compose["volumes"].keys() == {"data"}

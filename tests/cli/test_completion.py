"""Completion in shells, down to the names in the store."""

import shutil
import socket
import subprocess
import threading
import time

import pytest

from pglease.cli.completion import names_in_store
from pglease.cli.facts import show


def completions(pglease, line):
    words = line.split(" ")
    done = pglease(env={"_PGLEASE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)})
    assert (done.returncode, done.stderr) == (0, "")
    return [entry.partition(",")[2] for entry in done.stdout.splitlines() if entry]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell, call):
    code, out, _ = call("completion", shell)

    assert code == 0
    assert "_PGLEASE_COMPLETE" in out
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=out, text=True, timeout=60, check=False).returncode == 0


def test_another_shell_is_bad_usage(call):
    assert call("completion", "tcsh")[0] == 2


def test_names_complete_from_the_store(pglease, leases, until):
    for name in ("backup:a", "backup:b", "other"):
        assert leases.try_acquire(name)

    # On a busy machine the look-up may be given up, as at a silent store.
    assert until(lambda: completions(pglease, "pglease show back")) == ["backup:a", "backup:b"]
    assert until(lambda: completions(pglease, "pglease run oth")) == ["other"]
    assert completions(pglease, "pglease ch") == ["check"]


def test_a_store_that_does_not_answer_completes_nothing_and_soon(pglease):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, says nothing
        started = time.monotonic()

        found = completions(
            lambda **options: pglease(
                env={**options["env"], "PGLEASE_URL": f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/x"}
            ),
            "pglease show x",
        )

    assert found == []
    assert time.monotonic() - started < 15  # 300 ms, and the start of an interpreter on a busy machine


def test_a_look_up_that_hangs_is_given_up_after_300_ms(dsn, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr("pglease.cli.completion._find", lambda *_: never.wait(20))
    monkeypatch.setenv("PGLEASE_URL", dsn)
    ctx = show.make_context("show", ["x"])
    names_in_store(ctx, "")  # whatever is imported for the first time is not the look-up's time
    started = time.monotonic()

    assert names_in_store(ctx, "") == []

    assert time.monotonic() - started < 15
    never.set()


def test_completing_makes_no_table(pglease, sql):
    assert completions(pglease, "pglease show x") == []

    assert sql("SELECT to_regclass('pglease_leases')") == (None,)


def test_without_a_store_nothing_completes_and_nothing_is_said(pglease):
    assert completions(lambda **options: pglease(env={**options["env"], "PGLEASE_URL": ""}), "pglease show x") == []

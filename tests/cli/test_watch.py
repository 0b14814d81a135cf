"""`watch`: one line a change, for people and for programs."""

import json
import signal


def test_watch_tells_what_happens_line_by_line(start, leases):
    assert leases.try_acquire("job", ttl="10m")
    watching = start("watch", "job")
    assert "job  held by" in watching.stdout.readline()

    leases.release("job")
    assert "job  released by" in watching.stdout.readline()
    assert leases.try_acquire("job", ttl="10m")
    assert "job  acquired by" in watching.stdout.readline()

    watching.send_signal(signal.SIGINT)
    out, err = watching.communicate(timeout=60)
    assert (watching.returncode, out, err) == (130, "", "")


def test_watch_tells_programs_and_follows_a_prefix(start, leases):
    assert leases.try_acquire("shop:a", ttl="10m")
    watching = start("watch", "--prefix", "shop:", "--json")
    assert json.loads(watching.stdout.readline())["change"] == "present"

    assert leases.try_acquire("other", ttl="10m")
    assert leases.try_acquire("shop:b", ttl="10m")

    change = json.loads(watching.stdout.readline())
    assert (change["change"], change["name"], change["missed"], change["held"]) == ("acquired", "shop:b", 0, True)


def test_watch_ends_after_its_timeout(call, leases):
    assert leases.try_acquire("job", ttl="10m")

    code, out, err = call("watch", "job", "--timeout", "0.5")

    assert (code, err) == (0, "")
    assert out.count("\n") == 1


def test_watch_of_a_name_and_a_prefix_is_bad_usage(call):
    assert call("watch", "job", "--prefix", "j")[0] == 2

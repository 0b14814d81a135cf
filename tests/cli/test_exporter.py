"""`exporter`: answers Prometheus until it is told to end."""

import signal
import urllib.request

import pytest


def test_the_exporter_answers_and_ends_in_good_order(start, leases):
    assert leases.try_acquire("import:7", ttl="10m")
    exporter = start("exporter", "--listen", "127.0.0.1:0")
    address = exporter.stdout.readline().strip()

    with urllib.request.urlopen(address, timeout=60) as answer:
        text = answer.read().decode()
    exporter.send_signal(signal.SIGTERM)
    out, err = exporter.communicate(timeout=60)

    assert (exporter.returncode, out, err) == (0, "", "")
    assert "pglease_store_up 1.0" in text
    assert 'pglease_lease_holder_info{holder="somebody-else",name="import"} 1.0' in text
    assert "python_info" not in text


@pytest.mark.parametrize("address", ["nowhere", "host:port", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_bad_usage(call, address):
    code, _, err = call("exporter", "--listen", address)

    assert code == 2
    assert "is no address" in err

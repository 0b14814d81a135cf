"""`web`: serves pages until it is told to end, with a real server, a real PostgreSQL and a connection that breaks."""

import contextlib
import http.client
import queue
import re
import signal
import socket
import threading
import urllib.parse


class Browser:
    """Asks as a browser does, without following anything."""

    def __init__(self, address):
        parts = urllib.parse.urlsplit(address)
        self.host, self.port = parts.hostname, parts.port

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(self, method, path, body=None, **headers):
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()


class News:
    """What an EventSource hears, read on a thread until the server ends it."""

    def __init__(self, browser, path, **headers):
        self._heard = queue.SimpleQueue()
        self._connection = browser.connect()
        self._connection.request("GET", path, headers=headers)
        self._answer = self._connection.getresponse()
        self.kind = self._answer.headers["content-type"]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self):
        lines = []
        with contextlib.suppress(http.client.HTTPException, OSError):
            while line := self._answer.readline().decode():
                lines.append(line)
                if line == "\n":
                    self._heard.put("".join(lines))
                    lines = []
        self._heard.put(None)
        self._connection.close()

    def until(self, text):
        """The next news that have the text in them."""
        while (event := self._heard.get(timeout=60)) is not None:
            if text in event:
                return event
        raise AssertionError(f"the stream ended before {text!r}")


def test_a_hand_over_and_an_outage_are_seen_live_and_the_server_ends_in_good_order(start, leases, proxy, behind_proxy):
    assert leases.try_acquire("import:7", ttl="10m")
    server = start("web", "--listen", "127.0.0.1:0", "--every", "0.1s", env=behind_proxy)
    browser = Browser(server.stdout.readline().strip())

    status, headers, page = browser.ask("GET", "/")
    news, record = News(browser, "/events"), News(browser, "/events?name=import:7")
    assert (status, news.kind) == (200, "text/event-stream; charset=utf-8")
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "server" not in headers
    assert "somebody-else" in page
    news.until("somebody-else")
    leases.release("import:7")
    news.until("last: somebody-else")
    record.until("Last holder")
    proxy.refuse()
    proxy.cut()
    news.until("does not answer")
    proxy.pass_through()
    leases.try_acquire("import:8", ttl="10m")
    assert "does not answer" not in news.until("import:8")

    with socket.create_connection((browser.host, browser.port), timeout=60) as third:
        third.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard = third.recv(1)
        server.send_signal(signal.SIGTERM)
        while more := third.recv(65536):
            heard += more
    out, err = server.communicate(timeout=60)

    assert heard.endswith(b"\r\n0\r\n\r\n")  # the stream was ended, not broken off
    assert (server.returncode, out, err) == (0, "", "")


def test_an_operator_ends_a_hold_from_a_page(start, leases, call):
    assert leases.try_acquire("import:7", ttl="10m")
    server = start("web", "--listen", "127.0.0.1:0", "--allow-force-release")
    address = server.stdout.readline().strip()
    browser = Browser(address)
    origin = address[: address.index("/sign-in")]

    assert browser.ask("GET", "/", accept="text/html")[0] == 303
    _, headers, _ = browser.ask("GET", address.removeprefix(origin))
    known = {"Cookie": headers["set-cookie"].partition(";")[0]}
    _, _, page = browser.ask("GET", "/lease?name=import:7", **known)
    seal = re.search(r'name="seal" value="([0-9a-f]+)"', page)[1]
    form = urllib.parse.urlencode({"name": "import:7", "fencing_token": 1, "seal": seal})
    status, _, page = browser.ask("POST", "/force-release", form, Origin=origin, **known)

    assert status == 200
    assert "was ended" in page
    assert call("check", "import:7")[0] == 1


def test_what_cannot_be_served_is_told_in_one_sentence(call, monkeypatch):
    assert call("web", "--listen", "127.0.0.1:0", "--every", "0")[0] == 2
    code, _, err = call("web", "-q", "--allow-force-release")
    assert code == 2
    assert "PGLEASE_WEB_TOKEN" in err

    monkeypatch.setenv("PGLEASE_WEB_TOKEN", "short")
    code, _, err = call("web", "--listen", "127.0.0.1:0")
    assert code == 125
    assert "at least 16 characters" in err


def test_an_address_that_is_taken_is_told_in_one_sentence(call):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = call("web", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")

    assert code == 125
    assert "cannot be listened at" in err

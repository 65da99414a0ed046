"""The server of the live page: its files, who may ask, where it listens, how it stops."""

import re
import signal
import socket
import subprocess
import sys
from importlib import resources

import pytest

from meanshift.viz.explorer import server
from tests.support.explorer import get, post, serving
from tests.support.packages import hide_packages


def test_all_files_of_the_page_come_from_the_server_and_name_no_other(port):
    page = get(port, "/")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    names = re.findall(r'="/assets/([^"]+)"', page.body.decode())
    assert len(names) == len(set(names)) == 10
    for name in names:
        asset = get(port, f"/assets/{name}")
        assert asset.status == 200
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text


def test_the_ids_of_the_page_are_unique_and_its_tabs_are_named_by_them():
    text = (resources.files("meanshift.viz") / "assets/explorer.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) > 20 and len(ids) == len(set(ids))
    labels = re.findall(r'aria-labelledby="([^"]+)"', text)
    assert len(labels) == text.count("<section") == 5 and set(labels) <= set(ids)


@pytest.mark.parametrize(
    "path", ["/", "/api/run", "/api/nothing", "/thumbnail/train/0", "/assets/no"]
)
def test_every_response_has_the_security_headers(port, path):
    headers = get(port, path).headers
    assert headers["Content-Security-Policy"].startswith("default-src 'self'; img-src 'self' data:")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers and "Server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../explorer/server.py",
        "/assets/..%2f..%2fpyproject.toml",
        "/assets/%2e%2e/%2e%2e/README.md",
        "/assets//etc/passwd",
        "/thumbnail/train/..%2f..%2fetc%2fpasswd",
        "/thumbnail/..%2f..%2f/0",
        "/thumbnail/train/-1",
        "/thumbnail/train/60",
        "/thumbnail/train/99999999999999999999",
        "/thumbnail/snapshot/0",
        "/thumbnail/train/0/../../../config.json",
        "/config.json",
        "/api/point/60",
        "/api/point/x",
    ],
)
def test_no_other_file_or_image_can_be_reached(port, path):
    assert get(port, path).status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1234", 200),
        ("[::1]:80", 200),
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("192.168.0.7", 403),
    ],
)
def test_a_name_of_this_machine_that_is_not_loopback_is_refused(port, host, status):
    assert get(port, "/api/run", Host=host).status == status


def test_requests_of_other_sites_are_refused(port):
    assert get(port, "/api/run", Sec_Fetch_Site="cross-site").status == 403
    assert get(port, "/thumbnail/train/0", Sec_Fetch_Site="same-site").status == 403
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert get(port, "/", **link).status == 200 and get(port, "/api/run", **link).status == 403
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}"):
        assert post(port, "/api/stop", Origin=origin).status == 403
    assert get(port, "/api/stop", "POST").status == 403
    assert post(port, "/api/stop").status == 200
    assert get(port, "/api/stop").status == 405 and get(port, "/api/search").status == 405


def test_at_other_addresses_a_token_is_demanded(explorer):
    app, token = server.build_app(explorer, host="0.0.0.0")
    assert len(token) >= 32 and token != server.build_app(explorer, host="0.0.0.0")[1]
    paths = ["/", "/api/run", "/thumbnail/train/0", "/?token=wrong", f"/api/run?token={token}"]
    with serving(app) as port:
        for path in paths:
            assert get(port, path).status == 401
        redirect = get(port, f"/?token={token}", Host="a.host:80")
        assert redirect.status == 303 and redirect.headers["Location"] == "/"
        header = redirect.headers["Set-Cookie"]
        assert "HttpOnly" in header and "SameSite=strict" in header
        cookie = header.partition(";")[0]
        assert get(port, "/api/run", Cookie=cookie, Host="a.host:80").status == 200
        assert get(port, "/api/run", Cookie=cookie[:-1]).status == 401
        assert get(port, "/api/run", Cookie="\x01;=;" + cookie.replace("=", "")).status == 401
        assert post(port, "/api/stop", Cookie=cookie, Origin="http://evil.example").status == 403


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.9.9.9", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("myhost", False),
    ],
)
def test_only_loopback_needs_no_token(explorer, host, loopback):
    assert (server.build_app(explorer, host=host)[1] == "") == loopback


def test_if_a_port_is_taken_the_next_one_is_used():
    with server.listen("127.0.0.1", 0) as first:
        taken = first.getsockname()[1]
        with server.listen("127.0.0.1", taken) as second:
            assert taken < second.getsockname()[1] <= taken + 49
        with pytest.raises(ValueError, match="taken; give another --port"):
            server.listen("127.0.0.1", taken, tries=1)
    with pytest.raises(ValueError, match="--port: got 65536, need 0"):
        server.listen("127.0.0.1", 65_536)
    with pytest.raises(ValueError, match=r"cannot listen on 203\.0\.113\.1.*--host 127"):
        server.listen("203.0.113.1", 8800)


def test_the_printed_address_can_be_opened():
    assert server.url("127.0.0.1", 8800, "") == "http://127.0.0.1:8800/"
    assert server.url("::1", 1, "") == "http://[::1]:1/"
    assert server.url("0.0.0.0", 1, "t") == f"http://{socket.gethostname()}:1/?token=t"


@pytest.mark.slow
def test_an_interrupt_ends_it_with_exit_code_zero(run):
    code = (
        "from pathlib import Path; from meanshift.viz.explorer.server import serve;"
        f"serve(Path({str(run)!r}), port=18800, browser=False)"
    )
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        address = process.stdout.readline().split()[-1]
        port = int(address.rstrip("/").rpartition(":")[2])
        assert get(port, "/api/run").status == 200
        assert get(port, "/api/map").status == 200  # which starts t-SNE in the background
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "") and out.endswith("stopped\n")


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_its_packages_the_extra_is_named(run, monkeypatch, package):
    hide_packages(monkeypatch, package)
    with pytest.raises(ValueError, match=rf"^live pages need {package}; .*meanshift\[explore\]"):
        server.serve(run, browser=False)

"""What a dispatcher says when it must not, or cannot, work on the etcd that it is given: one line, a remedy, no hang."""

import os
import signal
import subprocess
import sys
import time

import etcd_client
import pytest
from certificates import Authority
from core_bench import make_manifest
from programs import Program, ask, wait_until

from dispatcher.etcd_access import EtcdAccess
from dispatcher.etcd_store import EtcdStore
from dispatcher.identity import FORMAT
from dispatcher.store import StoreFull
from feedline.etcd import Etcd
from manifests.errors import ConfigError, DispatcherUnavailable
from manifests.wire import messages as m

pytestmark = pytest.mark.process

KEY = "/feedline/v1/cluster"


@pytest.fixture
def make_etcd(tmp_path):
    made = []

    def make(name="etcd", **settings):
        server = Etcd(tmp_path / name, log=tmp_path / f"{name}.log", fsync=False, **settings)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def start(tmp_path):
    made = []

    def begin(etcd, *arguments, store="store", wait=True):
        addresses = etcd if isinstance(etcd, str) else str(etcd.address)
        line = [
            "--etcd",
            addresses,
            "--store",
            tmp_path / store,
            "--listen",
            "127.0.0.1:0",
            "--lease",
            "2s",
            *arguments,
        ]
        made.append(Program(*line, wait=wait))
        return made[-1]

    yield begin
    for found in made:
        if found.process.poll() is None:
            found.process.kill()
        found.process.communicate(timeout=10)


def refused(program, seconds=12.0):
    """The one line that it ends with, in time, with a failure's exit status and no traceback."""
    begin = time.monotonic()
    out, err = program.process.communicate(timeout=30)
    assert program.process.returncode in (1, 2) and out == "" and "Traceback" not in err, err
    assert time.monotonic() - begin < seconds
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.endswith(")"), f"no remedy: {line}"
    return line


def run_once(start, etcd, **settings):
    """Start on it, see that it serves, end it."""
    program = start(etcd, **settings)
    assert program.line.startswith("dispatcher grpc://")
    assert program.end()[0] == 0
    return program


# -- whose etcd is it ----------------------------------------------------------------------------------------------


def test_endpoints_of_two_clusters(make_etcd, start):
    one, two = make_etcd("one"), make_etcd("two")
    line = refused(start(f"{one.address},{two.address}", wait=False))
    assert "different etcd clusters" in line and str(one.address) in line and str(two.address) in line


def test_endpoints_of_two_etcds_that_were_set_up_alike(make_etcd, start):
    """etcd's own number of the cluster is the same for both: what was written tells."""
    one, two = (make_etcd(name, arguments=["--initial-cluster-token", "t"]) for name in ("one", "two"))
    with etcd_client.connect(one.address) as first, etcd_client.connect(two.address) as second:
        heads = [client.get_response("x").header.cluster_id for client in (first, second)]
    assert heads[0] == heads[1]
    line = refused(start(f"{one.address},{two.address}", wait=False))
    assert "different etcd clusters" in line and str(one.address) in line and str(two.address) in line


def test_records_and_folder_of_two_clusters(make_etcd, start, tmp_path):
    one, two = make_etcd("one"), make_etcd("two")
    run_once(start, one, store="a")
    run_once(start, two, store="b")
    with etcd_client.connect(one.address) as client:
        id_one = client.get(KEY)[0].decode().split('"')[3]
    id_two = (tmp_path / "b" / "cluster").read_text().split('"')[3]
    assert id_one != id_two and id_one in (tmp_path / "a" / "cluster").read_text()
    line = refused(start(one, store="b", wait=False))
    assert id_one in line and id_two in line and str(tmp_path / "b") in line and str(one.address) in line
    # the right ones still go together, and a second start changes nothing
    run_once(start, one, store="a")


def test_an_empty_side_takes_the_id_of_the_other(make_etcd, start, tmp_path):
    etcd = make_etcd()
    run_once(start, etcd, store="a")
    first = (tmp_path / "a" / "cluster").read_text()
    run_once(start, etcd, store="empty")
    assert (tmp_path / "empty" / "cluster").read_text() == first
    etcd.wipe()
    etcd.start()
    run_once(start, etcd, store="a")
    with etcd_client.connect(etcd.address) as client:
        assert client.get(KEY)[0].decode() == first


def test_a_folder_or_an_etcd_with_content_and_no_id_is_not_taken(make_etcd, start, tmp_path):
    etcd = make_etcd()
    run_once(start, etcd, store="a")
    (tmp_path / "other" / "manifests").mkdir(parents=True)
    (tmp_path / "other" / "manifests" / "x.parquet").write_bytes(b"x")
    line = refused(start(etcd, store="other", wait=False))
    assert "have no cluster id" in line and str(tmp_path / "other") in line
    with etcd_client.connect(etcd.address) as client:
        client.delete(KEY)
    line = refused(start(etcd, store="a", wait=False))
    assert f"records in etcd at {etcd.address} have no cluster id" in line


def test_records_of_a_newer_release(make_etcd, start, tmp_path):
    etcd = make_etcd()
    run_once(start, etcd)
    with etcd_client.connect(etcd.address) as client:
        before = client.get(KEY)[0].decode()
        client.put(KEY, before.replace(f'"format":{FORMAT}', f'"format":{FORMAT + 1}'))
        line = refused(start(etcd, wait=False))
        assert f"records of format {FORMAT + 1}" in line and f"up to {FORMAT}" in line
        client.put(KEY, before)
        client.put("/feedline/v1/records/jobs/x", b'{"t":"of-a-later-release"}')
        line = refused(start(etcd, wait=False))
        assert "the records in etcd cannot be read" in line and "newer" in line


# -- a full one ----------------------------------------------------------------------------------------------------


def test_a_full_etcd_is_named_at_start_and_while_running_and_recovers(make_etcd, start):
    etcd = make_etcd(quota=4 << 20)
    program = start(etcd)
    connection = program.connection
    manifest = make_manifest([3, 5, 4])
    ask(connection, m.HaveManifest(digest=manifest.digest, locations=""), m.ManifestKnown)
    connection.upload(f"manifest/{manifest.digest}", manifest.to_bytes(), 10)
    register = m.RegisterDataset(name="photos", version="1", digest=manifest.digest)
    try:
        with etcd_client.connect(etcd.address) as client:
            with pytest.raises(Exception, match="space exceeded"):
                for number in range(100):
                    client.put(f"/filler/{number}", bytes(300_000))
            with pytest.raises(DispatcherUnavailable, match="NOSPACE") as caught:
                connection.call(register, m.DatasetRegistered, timeout=8)
            assert "alarm disarm" in caught.value.remedy and "defrag" in caught.value.remedy
            # it stays, and goes on saying so
            with pytest.raises(DispatcherUnavailable, match="NOSPACE") as caught:
                connection.call(register, m.DatasetRegistered, timeout=8)
            assert "alarm disarm" in caught.value.remedy
            line = refused(start(etcd, wait=False))
            assert "NOSPACE" in line and "alarm disarm" in line and str(etcd.address) in line
            client.delete_prefix("/filler/")
            client.compact(client.get("/feedline/v1/term")[1].response_header.revision)
            client.defragment()
            for alarm in list(client.list_alarms()):
                list(client.disarm_alarm(alarm.member_id))
        assert ask(connection, register, m.DatasetRegistered).new
        wait_until(lambda: b'"ok": true' in connection.call(m.GetStatus(), m.Document, timeout=5).json, 5)
    finally:
        connection.close()
    code, _, err = program.end()
    assert code == 0 and "Traceback" not in err


def test_a_full_store_is_an_error_of_its_own(make_etcd):
    etcd = make_etcd(quota=1 << 20)
    store = EtcdStore([etcd.address])
    term = store.campaign("me", 30, lambda _: False)
    with pytest.raises(StoreFull, match="NOSPACE"):
        for sequence in range(100):
            store.commit(term, sequence, {f"k{sequence}": bytes(200_000)}, [])
    assert not store.info().ok
    store.close()


# -- TLS and users -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    return {
        "ca": ours.file, "other_ca": theirs.file, "server": ours.sign("server"), "root": ours.sign("root"),
        "client": ours.sign("client"), "other_client": theirs.sign("other_client"),
        "expired": ours.sign("expired", expired=True), "elsewhere": ours.sign("elsewhere", "127.9.9.9"),
    }  # fmt: skip


def secure(make_etcd, certificates, *, server="server", mutual=False, name="etcd"):
    pair = certificates[server]
    arguments = ["--cert-file", str(pair.cert), "--key-file", str(pair.key)]
    if mutual:
        arguments += ["--client-cert-auth", "--trusted-ca-file", str(certificates["ca"])]
    return make_etcd(name, scheme="https", arguments=arguments)


def options(certificates, *, ca="ca", client=None):
    found = ["--etcd-ca", certificates[ca]]
    if client:
        found += ["--etcd-cert", certificates[client].cert, "--etcd-key", certificates[client].key]
    return found


def test_mutual_tls(make_etcd, start, certificates):
    etcd = secure(make_etcd, certificates, mutual=True)
    program = start(etcd, *options(certificates, client="client"))
    connection = program.connection
    assert b'"ok": true' in ask(connection, m.GetStatus(), m.Document).json
    connection.close()
    assert program.end()[0] == 0
    line = refused(start(etcd, *options(certificates), wait=False))
    assert "refuses us without --etcd-cert" in line
    line = refused(start(etcd, *options(certificates, client="other_client"), wait=False))
    assert "refuses our certificate" in line and "other_client" in line
    line = refused(start(etcd, wait=False))
    assert f"etcd at {etcd.address}: it speaks TLS (give --etcd-ca)" in line


@pytest.mark.parametrize(
    ("server", "ca", "says"),
    [("server", "other_ca", "unable to get local issuer certificate"), ("expired", "ca", "expired"),
     ("elsewhere", "ca", "IP address mismatch")],
)  # fmt: skip
def test_certificates_that_do_not_fit(make_etcd, start, certificates, server, ca, says):
    etcd = secure(make_etcd, certificates, server=server)
    line = refused(start(etcd, *options(certificates, ca=ca), wait=False))
    assert f"etcd at {etcd.address}: its certificate is not accepted" in line and says in line


def test_tls_on_a_plain_etcd(make_etcd, start, certificates):
    etcd = make_etcd()
    assert "it does not speak TLS" in refused(start(etcd, *options(certificates), wait=False))


def auth_on(client):
    """User ``root``, and ``feed`` who may read and write our keys; then authentication is on."""
    rpc = etcd_client.etcdrpc
    stub = rpc.AuthStub(client.channel)
    for user, password in (("root", "secret-of-root"), ("feed", "secret-of-feed")):
        stub.UserAdd(rpc.AuthUserAddRequest(name=user, password=password))
    stub.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
    stub.RoleAdd(rpc.AuthRoleAddRequest(name="feed"))
    permission = etcd_client.auth_pb2.Permission(permType=2, key=b"/feedline/", range_end=b"/feedline0")
    stub.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="feed", perm=permission))
    for user in ("root", "feed"):
        stub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=user))
    stub.AuthEnable(rpc.AuthEnableRequest())


def test_user_and_password(make_etcd, start, certificates, tmp_path, monkeypatch):
    """A wrong password is named; a token that etcd does not know any more is renewed."""
    etcd = secure(make_etcd, certificates)
    with etcd_client.connect(etcd.address, ca_cert=str(certificates["ca"])) as client:
        auth_on(client)
    given = options(certificates)
    assert "refused a client without a user" in refused(start(etcd, *given, wait=False))
    file = tmp_path / "password"
    file.write_text("wrong\n")
    line = refused(start(etcd, *given, "--etcd-user", "feed", "--etcd-password-file", file, wait=False))
    assert "refused user feed" in line and "--etcd-user" in line and "wrong" not in line
    monkeypatch.setenv("FEEDLINE_ETCD_PASSWORD", "secret-of-feed")
    program = start(etcd, *given, "--etcd-user", "feed")
    connection = program.connection
    try:
        assert b'"ok": true' in ask(connection, m.GetStatus(), m.Document).json
        # a password that is set anew, also to the same, ends the user's tokens
        root = {"ca_cert": str(certificates["ca"]), "user": "root", "password": "secret-of-root"}
        with etcd_client.connect(etcd.address, **root) as client:
            change = etcd_client.etcdrpc.AuthUserChangePasswordRequest(name="feed", password="secret-of-feed")
            etcd_client.etcdrpc.AuthStub(client.channel).UserChangePassword(change, metadata=client.metadata)
        manifest = make_manifest([3, 5, 4])
        connection.upload(f"manifest/{manifest.digest}", manifest.to_bytes(), 10)
        register = m.RegisterDataset(name="photos", version="1", digest=manifest.digest)
        assert connection.call(register, m.DatasetRegistered, timeout=5).new, "nothing of it is to be seen"
        assert connection.call(m.Hello(), m.HelloReply, timeout=5).term == 1
        wait_until(lambda: b'"ok": true' in ask(connection, m.GetStatus(), m.Document).json, 10)
    finally:
        connection.close()
    code, _, err = program.end()
    assert code == 0 and "secret-of-feed" not in err and "Traceback" not in err
    assert "asking for a new one" in err


def test_a_user_on_an_etcd_without_users(make_etcd, start, certificates, monkeypatch):
    etcd = secure(make_etcd, certificates)
    monkeypatch.setenv("FEEDLINE_ETCD_PASSWORD", "x")
    line = refused(start(etcd, *options(certificates), "--etcd-user", "feed", wait=False))
    assert "authentication is not enabled" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--etcd-user", "x"], "no password for the etcd user x"),
        (["--etcd-user", "x", "--etcd-password-file", "PASSWORD"], "--etcd-user without TLS"),
        (["--etcd-password-file", "PASSWORD"], "an etcd password without a user"),
        (["--etcd-user", "x", "--etcd-password-file", "/no/such"], "/no/such"),
        (["--etcd-ca", "/no/such.pem"], "--etcd-ca /no/such.pem cannot be read"),
        (["--etcd-ca", "PASSWORD"], "give PEM files"),
        (["--etcd-cert", "PASSWORD"], "only one of --etcd-cert and --etcd-key"),
        (["--etcd-cert", "PASSWORD", "--etcd-key", "PASSWORD"], "--etcd-cert without --etcd-ca"),
    ],
)
@pytest.mark.parametrize("program", [["-m", "dispatcher"], ["-m", "feedline", "dispatcher"]])
def test_options_that_cannot_be_meant(tmp_path, arguments, says, program):
    (tmp_path / "password").write_text("pass\n")
    line = [str(tmp_path / "password") if part == "PASSWORD" else part for part in arguments]
    environment = {name: value for name, value in os.environ.items() if name != "FEEDLINE_ETCD_PASSWORD"}
    done = subprocess.run(
        [sys.executable, *program, "--etcd", "127.0.0.1:1", *line], capture_output=True, text=True, timeout=30,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_access_does_not_show_its_password(certificates):
    access = EtcdAccess(ca=certificates["ca"], user="x", password="secret")
    assert "secret" not in repr(access)
    with pytest.raises(ConfigError, match="without TLS"):
        EtcdAccess(user="x", password="secret")


def test_sigterm_while_it_waits_for_etcd(start):
    program = start("127.0.0.1:1", wait=False)
    assert "127.0.0.1:1" in program.log_line()
    code, out, err = program.end(signal.SIGTERM)
    assert code == 0 and out == "" and "Traceback" not in err

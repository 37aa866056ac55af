//! NBD over TLS, with libnbd (GnuTLS) and QEMU as clients. Certificates are made for each test.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::harness::{
    MIB, RawNbdClient, Scratch, Serve, TestClient, WEIR, Weir, assert_contains, pause, qemu_img, qemu_io,
    text,
    wire::{OPT_LIST, OPT_STARTTLS, REP_ACK, REP_ERR_TLS_REQD, option_header},
};

/// A certificate authority for a server and a client, in the directory layout of QEMU and libnbd.
pub(crate) struct CertificateAuthority(PathBuf);

impl CertificateAuthority {
    pub(crate) fn new(scratch: &Scratch, name: &str) -> Self {
        let directory = scratch.path(name);
        fs::create_dir(&directory).unwrap();
        let authority = Self(directory);
        let subject = format!("/CN={name}");
        let key =
            ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"];
        TestClient::new("openssl")
            .args(key)
            .args(["-subj", &subject, "-addext", "basicConstraints=critical,CA:TRUE"])
            .args(["-addext", "keyUsage=critical,keyCertSign,cRLSign"])
            .args(["-keyout", text(&authority.file("ca-key.pem"))])
            .args(["-out", text(&authority.file("ca-cert.pem"))])
            .succeeds();
        authority.issue("server", "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n");
        authority.issue("client", "extendedKeyUsage=clientAuth\n");
        authority
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn path(&self) -> &str {
        text(&self.0)
    }

    fn issue(&self, name: &str, extensions: &str) {
        self.sign(name, &format!("/CN={name}"), extensions);
    }

    /// Issues another certificate of the server, for these addresses, which it may also use as a
    /// client.
    pub(crate) fn issue_server(&self, addresses: &[&str]) {
        let addresses: Vec<_> = addresses.iter().map(|address| format!("IP:{address}")).collect();
        let names = addresses.join(",");
        self.issue("server", &format!("subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n"));
    }

    /// Issues a client certificate with this subject.
    pub(crate) fn issue_client(&self, name: &str, subject: &str) {
        self.sign(name, subject, "extendedKeyUsage=clientAuth\n");
    }

    fn sign(&self, name: &str, subject: &str, extensions: &str) {
        let file = |kind: &str| self.file(&format!("{name}-{kind}.pem"));
        fs::write(file("ext"), extensions).unwrap();
        TestClient::new("openssl")
            .args(["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
            .args(["-subj", subject])
            .args(["-keyout", text(&file("key")), "-out", text(&file("request"))])
            .succeeds();
        TestClient::new("openssl")
            .args(["x509", "-req", "-days", "1", "-in", text(&file("request")), "-out", text(&file("cert"))])
            .args(["-CA", text(&self.file("ca-cert.pem")), "-CAkey", text(&self.file("ca-key.pem"))])
            .args(["-CAcreateserial", "-extfile", text(&file("ext"))])
            .succeeds();
    }

    /// A directory with the authority's certificate only, for a client without a certificate.
    pub(crate) fn without_client(&self, scratch: &Scratch, name: &str) -> PathBuf {
        let directory = scratch.path(name);
        fs::create_dir(&directory).unwrap();
        fs::copy(self.file("ca-cert.pem"), directory.join("ca-cert.pem")).unwrap();
        directory
    }

    fn serve(&self, scratch: &Scratch, more: &[&str]) -> Weir {
        Serve::new(scratch)
            .on_tcp()
            .args(["memory:4M", "--name", "disk", "--tls-certificates", self.path()])
            .args(more)
            .start()
    }
}

fn uri_with_certificates(weir: &Weir, directory: &Path) -> String {
    format!("nbds://localhost:{}/disk?tls-certificates={}", weir.port(), text(directory))
}

/// Copies data to the server by one URI, and back by another.
#[track_caller]
fn assert_round_trip(scratch: &Scratch, write_uri: &str, read_uri: &str) {
    let original = scratch.filled("original", 4 * MIB);
    let copy = scratch.path("back");
    TestClient::new("nbdcopy").args([text(&original), write_uri]).succeeds();
    TestClient::new("nbdcopy").args([read_uri, text(&copy)]).succeeds();
    assert!(fs::read(&copy).unwrap() == fs::read(&original).unwrap(), "the copy differs");
}

fn size(uri: &str) -> TestClient {
    TestClient::new("nbdinfo").args(["--size", uri])
}

/// Arguments with which QEMU's tools open the export as `driver=nbd` with these credentials.
fn qemu(weir: &Weir, credentials: &str) -> Vec<String> {
    ["--object", credentials, "--image-opts", &image_options(weir)].map(str::to_owned).to_vec()
}

fn image_options(weir: &Weir) -> String {
    format!(
        "driver=nbd,server.type=inet,server.host=localhost,server.port={},export=disk,tls-creds=t",
        weir.port()
    )
}

fn x509(directory: &Path) -> String {
    format!("tls-creds-x509,id=t,endpoint=client,dir={}", text(directory))
}

#[test]
fn data_survives_a_round_trip_with_certificates() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = authority.serve(&scratch, &["--tls", "required", "--tls-verify-peer"]);
    let uri = uri_with_certificates(&weir, &authority.0);
    assert_eq!(size(&uri).succeeds().trim(), (4 * MIB).to_string());
    assert_round_trip(&scratch, &uri, &uri);
    assert_eq!(TestClient::new("nbdinfo").args(["--json", &uri]).json()["TLS"], true);
}

#[test]
fn qemu_uses_tls_with_certificates() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = authority.serve(&scratch, &["--tls", "required", "--tls-verify-peer"]);
    let info = qemu_img(["info"]).args(qemu(&weir, &x509(&authority.0))).succeeds();
    assert_contains(&info, &["virtual size: 4 MiB"]);
    let options = ["--object", &x509(&authority.0), "--image-opts"];
    qemu_io(options, ["write -P 0x5a 1M 1M", "read -P 0x5a 1M 1M", "flush"], image_options(&weir));
}

#[test]
fn client_without_a_certificate_is_served_unless_peers_are_verified() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let anonymous = authority.without_client(&scratch, "anonymous");
    let weir = authority.serve(&scratch, &["--tls", "required"]);
    size(&uri_with_certificates(&weir, &anonymous)).succeeds();
    weir.stop();
    let weir = authority.serve(&scratch, &["--tls", "required", "--tls-verify-peer"]);
    size(&uri_with_certificates(&weir, &anonymous)).fails();
    size(&uri_with_certificates(&weir, &authority.0)).succeeds();
}

#[test]
fn client_of_another_authority_is_rejected() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "ours");
    let other_authority = CertificateAuthority::new(&scratch, "theirs");
    let weir = authority.serve(&scratch, &["--tls", "required", "--tls-verify-peer"]);
    // A client that trusts weir's server and presents a certificate of another authority.
    let impostor = authority.without_client(&scratch, "impostor");
    for name in ["client-cert.pem", "client-key.pem"] {
        fs::copy(other_authority.file(name), impostor.join(name)).unwrap();
    }
    size(&uri_with_certificates(&weir, &impostor)).fails();
    weir.wait_for_log("certificate");
    // A client that does not trust this authority rejects the server.
    size(&uri_with_certificates(&weir, &other_authority.0)).fails();
    size(&uri_with_certificates(&weir, &authority.0)).succeeds();
}

#[test]
fn plain_clients_are_rejected_if_tls_is_required() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = authority.serve(&scratch, &["--tls", "required"]);
    let stderr = size(&weir.uri("disk")).fails();
    assert_contains(&stderr, &["TLS"]);
    let stderr = qemu_img(["info", "-f", "raw", &weir.uri("disk")]).fails();
    assert_contains(&stderr, &["TLS"]);
}

#[test]
fn no_information_before_tls() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--tls", "required", "--tls-certificates", authority.path()])
        .start();
    let mut client = RawNbdClient::greet(weir.socket());
    let replies = client.option(OPT_LIST, &[]);
    assert_eq!(replies.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [REP_ERR_TLS_REQD]);
    assert_eq!(client.option(OPT_STARTTLS, &[]), [(REP_ACK, vec![])]);
    // The next bytes must be TLS.
    client.send(b"this is no TLS record, it is plain text\r\n\r\n");
    client.wait_for_close();
    let unix =
        format!("nbds+unix:///memory?socket={}&tls-certificates={}", text(weir.socket()), authority.path());
    size(&unix).succeeds();
}

#[test]
fn handshake_waits_for_memory() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--tls", "on", "--tls-certificates", authority.path()])
        .args(["--memory", "128M", "--max-connections", "0"])
        .start();
    // Unfinished handshakes hold the memory of TLS.
    let mut silent_clients = Vec::new();
    while !weir.log_text().contains("the memory budget is exhausted") {
        let mut client = RawNbdClient::greet(weir.socket());
        assert_eq!(client.option(OPT_STARTTLS, &[]), [(REP_ACK, vec![])]);
        silent_clients.push(client);
    }
    let unix =
        format!("nbds+unix:///memory?socket={}&tls-certificates={}", text(weir.socket()), authority.path());
    let client = thread::spawn(move || size(&unix).succeeds());
    // The next handshake must be rejected, or wait until memory is free.
    for _ in 0..100 {
        if client.is_finished() {
            break;
        }
        pause();
    }
    drop(silent_clients);
    assert_eq!(client.join().expect("it is served"), format!("{MIB}\n"));
    weir.stop();
}

/// Clients that wait for memory do not block a worker: the only worker serves connected clients.
#[test]
fn waiting_handshakes_block_no_worker() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--tls", "on", "--tls-certificates", authority.path(), "--workers", "1"])
        .args(["--memory", "128M", "--max-connections", "0"])
        .start();
    let (mut served, _) = RawNbdClient::negotiated(weir.socket(), "memory");
    let mut silent_clients = Vec::new();
    while !weir.log_text().contains("the memory budget is exhausted") {
        let mut client = RawNbdClient::greet(weir.socket());
        assert_eq!(client.option(OPT_STARTTLS, &[]), [(REP_ACK, vec![])]);
        silent_clients.push(client);
    }
    // These clients wait for memory and stay silent as well.
    for _ in 0..3 {
        let mut client = RawNbdClient::greet(weir.socket());
        client.send(&option_header(OPT_STARTTLS, 0));
        silent_clients.push(client);
    }
    // Several times the time that a handshake may take while other clients wait.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        served.read(0, 4096).expect("the client is served");
    }
    drop(silent_clients);
    served.read(0, 4096).expect("the client is served");
    weir.stop();
}

#[test]
fn tls_is_optional_for_clients() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let weir = authority.serve(&scratch, &["--tls", "on"]);
    size(&weir.uri("disk")).succeeds();
    size(&uri_with_certificates(&weir, &authority.0)).succeeds();
}

#[test]
fn pre_shared_keys_suffice() {
    let scratch = Scratch::new();
    let keys = scratch.path("keys.psk");
    for user in ["alice", "bob"] {
        TestClient::new("psktool").args(["-u", user, "-p", text(&keys)]).succeeds();
    }
    let weir = Serve::new(&scratch)
        .on_tcp()
        .args(["memory:4M", "--name", "disk", "--tls", "required", "--tls-psk", text(&keys)])
        .start();
    let uri = |user: &str, keys: &Path| {
        format!("nbds://{user}@localhost:{}/disk?tls-psk-file={}", weir.port(), text(keys))
    };
    for user in ["alice", "bob"] {
        assert_eq!(size(&uri(user, &keys)).succeeds().trim(), (4 * MIB).to_string());
    }
    assert_round_trip(&scratch, &uri("bob", &keys), &uri("alice", &keys));
    let credentials =
        format!("tls-creds-psk,id=t,endpoint=client,username=alice,dir={}", text(&scratch.path("")));
    let info = qemu_img(["info"]).args(qemu(&weir, &credentials)).succeeds();
    assert_contains(&info, &["virtual size: 4 MiB"]);

    // A self-made key is rejected for any name.
    let forged = scratch.path("forged.psk");
    for user in ["alice", "mallory"] {
        TestClient::new("psktool").args(["-u", user, "-p", text(&forged)]).succeeds();
        size(&uri(user, &forged)).fails();
    }
    size(&weir.uri("disk")).fails();
    size(&uri("alice", &keys)).succeeds();
}

#[test]
fn reload_reads_renewed_credentials_and_keeps_connections() {
    let scratch = Scratch::new();
    let (old, new) =
        (CertificateAuthority::new(&scratch, "authority"), CertificateAuthority::new(&scratch, "new"));
    let control = format!("unix:{}", text(&scratch.socket("qmp")));
    let config = scratch.file(
        "weir.toml",
        format!(
            "[daemon]\n\
             qmp = \"{control}\"\n\
             tls = \"required\"\n\
             tls-certificates = \"{}\"\n\
             tls-verify-peer = true\n\
             sandbox = \"require\"\n\
             [disk.disk]\n\
             image = \"memory:4M\"\n",
            old.path()
        ),
    );
    let weir = Serve::new(&scratch).on_tcp().arg("--config").arg(config).start();
    let client_directory = old.without_client(&scratch, "mine");
    for name in ["client-cert.pem", "client-key.pem"] {
        fs::copy(old.file(name), client_directory.join(name)).unwrap();
    }
    let (by_old, by_new) =
        (uri_with_certificates(&weir, &client_directory), uri_with_certificates(&weir, &new.0));
    size(&by_old).succeeds();
    size(&by_new).fails();
    let reload = || TestClient::new(WEIR).args(["reload", "--qmp", &control]);
    // A connection survives the replacement of the certificate that admitted it.
    let script = format!(
        "import \
         subprocess\nh.set_uri_allow_local_file(True)\nh.connect_uri('{by_old}')\nh.pwrite(b'a' * \
         512, 0)\nfor name in ['ca-cert', 'server-cert', 'server-key']:\n    \
         subprocess.check_call(['mv', '-f', f'{new}/{{name}}.pem', \
         '{old}'])\nsubprocess.check_call(['{WEIR}', 'reload', '--qmp', '{control}'])\nassert \
         h.pread(512, 0) == b'a' * 512",
        new = new.path(),
        old = old.path(),
    );
    fs::copy(new.file("ca-cert.pem"), scratch.path("ca-cert.pem")).unwrap();
    TestClient::new("nbdsh").args(["-c", &script]).succeeds();
    fs::copy(scratch.path("ca-cert.pem"), new.file("ca-cert.pem")).unwrap();
    size(&by_new).succeeds();
    size(&by_old).fails();
    // A key that does not match is rejected, and the previous pair stays in force.
    fs::copy(new.file("client-key.pem"), old.file("server-key.pem")).unwrap();
    assert_contains(&reload().fails(), &["server-key.pem: not the key of", "server-cert.pem"]);
    // A named pipe is rejected instead of waiting for its writer.
    fs::remove_file(old.file("server-key.pem")).unwrap();
    TestClient::new("mkfifo").args([text(&old.file("server-key.pem"))]).succeeds();
    assert_contains(&reload().fails(), &["server-key.pem: is a named pipe, not a file"]);
    size(&by_new).succeeds();
    weir.stop();
}

#[test]
fn credentials_that_are_missing_or_unused_are_named() {
    let scratch = Scratch::new();
    let empty = scratch.path("empty");
    fs::create_dir(&empty).unwrap();
    let serve = |arguments: &[&str]| Serve::new(&scratch).arg("memory:1M").args(arguments);
    let stderr = serve(&["--tls", "on", "--tls-certificates", text(&empty)]).fails();
    assert_contains(
        &stderr,
        &[text(&empty.join("server-cert.pem")), "No such file", "the server's certificate"],
    );
    let stderr = serve(&["--tls", "on", "--tls-psk", text(&empty.join("keys"))]).fails();
    assert_contains(&stderr, &["weir: TLS: ", text(&empty.join("keys")), "No such file", "psktool"]);
    assert_contains(&serve(&["--tls", "required"]).rejects_usage(), &["no credentials", "tls-certificates"]);
    assert_contains(&serve(&["--tls-psk", "keys"]).rejects_usage(), &["--tls-psk", "tls is off"]);
}

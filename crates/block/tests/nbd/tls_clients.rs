//! libnbd's and QEMU's clients (both on GnuTLS) through TLS.

use crate::certificates::Authority;
use crate::clients::{LIBNBD, QEMU, fails, succeeds};
use crate::server::{Scratch, Server};
use block::export::nbd::{TlsPolicy, TlsServer};

const KEYS: &str = "alice:0123456789abcdef0123456789abcdef\n";

/// A directory with keys.psk, as both clients and the server read it.
fn psk(keys: &str) -> Scratch {
    let scratch = Scratch::new();
    std::fs::write(scratch.0.join("keys.psk"), keys).unwrap();
    scratch
}

fn psk_server(policy: TlsPolicy) -> (String, Scratch) {
    let keys = psk(KEYS);
    let server = Server::new(policy, Some(TlsServer::psk(&keys.0).unwrap()));
    (server.listen_unix(), keys)
}

fn psk_uri(socket: &str, user: &str, keys: &Scratch) -> String {
    format!("nbds+unix://{user}@/disk?socket={socket}&tls-psk-file={}/keys.psk", keys.0.display())
}

#[test]
fn nbdinfo_with_a_pre_shared_key() {
    let (socket, keys) = psk_server(TlsPolicy::Required);
    let json = succeeds(LIBNBD, "nbdinfo", &["--json", &psk_uri(&socket, "alice", &keys)]);
    assert!(json.contains("\"TLS\": true") && json.contains("\"structured\": true"), "{json}");
}

#[test]
fn a_wrong_key_or_user_is_refused() {
    let (socket, _keys) = psk_server(TlsPolicy::Required);
    let wrong = psk("alice:ffffffffffffffffffffffffffffffff\nmallory:0123456789abcdef0123456789abcdef\n");
    for user in ["alice", "mallory"] {
        let output = fails(LIBNBD, "nbdinfo", &[&psk_uri(&socket, user, &wrong)]);
        assert!(output.contains("gnutls"), "{output}");
    }
}

#[test]
fn a_client_in_the_clear_is_told_that_tls_is_required() {
    let (socket, _keys) = psk_server(TlsPolicy::Required);
    fails(LIBNBD, "nbdinfo", &[&format!("nbd+unix:///disk?socket={socket}")]);
    let output =
        fails(QEMU, "qemu-img", &["info", "-f", "raw", &format!("nbd+unix:///disk?socket={socket}")]);
    assert!(output.contains("TLS"), "{output}");
}

#[test]
fn where_tls_is_allowed_both_get_in() {
    let (socket, keys) = psk_server(TlsPolicy::Allowed);
    succeeds(LIBNBD, "nbdinfo", &[&format!("nbd+unix:///disk?socket={socket}")]);
    succeeds(LIBNBD, "nbdinfo", &[&psk_uri(&socket, "alice", &keys)]);
}

#[test]
fn nbdcopy_through_tls() {
    let (socket, keys) = psk_server(TlsPolicy::Required);
    let (from, to) = (keys.0.join("from"), keys.0.join("to"));
    let bytes: Vec<u8> = (0..8u32 << 20).map(|n| (n % 251) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    let uri = psk_uri(&socket, "alice", &keys);
    succeeds(LIBNBD, "nbdcopy", &[from.to_str().unwrap(), &uri]);
    succeeds(LIBNBD, "nbdcopy", &[&uri, to.to_str().unwrap()]);
    assert!(std::fs::read(&to).unwrap() == bytes, "what came back is not what was sent");
}

#[test]
fn qemu_img_with_a_pre_shared_key() {
    let (socket, keys) = psk_server(TlsPolicy::Required);
    let object = format!("tls-creds-psk,id=t,dir={},username=alice,endpoint=client", keys.0.display());
    let image = format!("driver=nbd,server.type=unix,server.path={socket},export=disk,tls-creds=t");
    let info = succeeds(QEMU, "qemu-img", &["info", "--object", &object, "--image-opts", &image]);
    assert!(info.contains("8 MiB"), "{info}");
}

/// A server that wants client certificates, its port, and the authority's client directory.
fn x509_server(authority: &Authority) -> (u16, Scratch) {
    let (servers, clients) = (Scratch::new(), Scratch::new());
    authority.issue(&servers.0, "server");
    authority.issue(&clients.0, "client");
    let server = Server::new(TlsPolicy::Required, Some(TlsServer::x509(&servers.0, true).unwrap()));
    (server.listen_tcp(), clients)
}

fn x509_uri(port: u16, clients: &Scratch) -> String {
    format!("nbds://localhost:{port}/disk?tls-certificates={}", clients.0.display())
}

#[test]
fn nbdinfo_with_a_certificate() {
    let (port, clients) = x509_server(&Authority::new());
    let json = succeeds(LIBNBD, "nbdinfo", &["--json", &x509_uri(port, &clients)]);
    assert!(json.contains("\"TLS\": true"), "{json}");
}

#[test]
fn a_client_without_a_certificate_or_with_a_stranger_s_is_refused() {
    let authority = Authority::new();
    let (port, clients) = x509_server(&authority);
    // A stranger's certificate, next to the right authority, so that the client trusts the server.
    let stranger = Scratch::new();
    Authority::new().issue(&stranger.0, "client");
    std::fs::copy(clients.0.join("ca-cert.pem"), stranger.0.join("ca-cert.pem")).unwrap();
    fails(LIBNBD, "nbdinfo", &[&x509_uri(port, &stranger)]);
    let none = Scratch::new();
    std::fs::copy(clients.0.join("ca-cert.pem"), none.0.join("ca-cert.pem")).unwrap();
    fails(LIBNBD, "nbdinfo", &[&x509_uri(port, &none)]);
    succeeds(LIBNBD, "nbdinfo", &[&x509_uri(port, &clients)]);
}

#[test]
fn qemu_img_with_a_certificate() {
    let (port, clients) = x509_server(&Authority::new());
    let object = format!("tls-creds-x509,id=t,dir={},endpoint=client,verify-peer=on", clients.0.display());
    let image = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=t");
    let info = succeeds(QEMU, "qemu-img", &["info", "--object", &object, "--image-opts", &image]);
    assert!(info.contains("8 MiB"), "{info}");
}

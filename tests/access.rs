//! Access rules: networks, connections per address, client names proved by TLS; and the errors that
//! rejected clients receive.

use std::{
    fs,
    io::Read as _,
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    os::fd::AsRawFd as _,
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use serde_json::{Value, json};

use crate::{
    harness::{
        DEADLINE, MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, need, operator, peer, text,
    },
    tls::CertificateAuthority,
};

/// Connects from this loopback address; returns the stream and the length of the greeting: the
/// eight bytes of NBD's magic, or 0.
fn connect_from(port: u16, from: Ipv4Addr) -> (TcpStream, usize) {
    let socket =
        socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    let at = |address: Ipv4Addr, port| SockaddrIn::from(SocketAddrV4::new(address, port));
    bind(socket.as_raw_fd(), &at(from, 0)).expect("all of 127.0.0.0/8 is local");
    connect(socket.as_raw_fd(), &at(Ipv4Addr::LOCALHOST, port)).expect("a listener");
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket has a timeout");
    let mut greeting = Vec::new();
    // A reset counts as an end as well.
    let _ = stream.by_ref().take(8).read_to_end(&mut greeting);
    (stream, greeting.len())
}

fn refused(scratch: &Scratch) -> Value {
    operator::status(scratch, "0")["servers"][0]["refused"].clone()
}

fn on_tcp(scratch: &Scratch, more: &[&str]) -> Weir {
    Serve::new(scratch)
        .on_tcp()
        .args(["memory:1M", "--name", "disk", "--qmp", &operator::socket(scratch)])
        .args(more)
        .start()
}

#[test]
fn most_specific_network_rule_applies_before_the_greeting() {
    let scratch = Scratch::new();
    let weir =
        on_tcp(&scratch, &["--allow", "127.0.0.0/8", "--deny", "127.1.0.0/16", "--allow", "127.1.2.3"]);
    let bytes = |from: [u8; 4]| connect_from(weir.port(), from.into()).1;
    assert_eq!([bytes([127, 0, 0, 1]), bytes([127, 1, 2, 3])], [8, 8]);
    assert_eq!([bytes([127, 1, 2, 4]), bytes([127, 1, 0, 0])], [0, 0]);
    assert_eq!(refused(&scratch), json!({ "networks": 2, "connections": 0, "names": 0, "exports": 0 }));
    assert_contains(
        &operator::run_ok(&scratch, &["status", "--all", "--interval", "0"]),
        &["REJECTED AT", "BY NETWORK"],
    );
    assert_contains(&weir.stop(), &["a client was rejected", "address=\"127.1.2.4\""]);
}

#[test]
fn ipv4_rules_apply_to_mapped_ipv6_addresses() {
    let scratch = Scratch::new();
    let port = on_tcp(&scratch, &[]).port();
    let address = format!("[::]:{port}");
    let _weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["memory:1M", "--nbd", &address, "--allow", "::/0", "--allow", "127.0.0.1"])
        .start();
    assert_eq!(connect_from(port, Ipv4Addr::LOCALHOST).1, 8);
    assert_eq!(connect_from(port, Ipv4Addr::new(127, 0, 0, 2)).1, 0);
}

#[test]
fn connections_per_address_are_limited() {
    let scratch = Scratch::new();
    let weir = on_tcp(&scratch, &["--max-connections-per-address", "2"]);
    let (limited, other) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2));
    let (first, second) = (connect_from(weir.port(), limited), connect_from(weir.port(), limited));
    assert_eq!((first.1, second.1), (8, 8));
    assert_eq!((connect_from(weir.port(), limited).1, connect_from(weir.port(), other).1), (0, 8));
    assert_eq!(refused(&scratch)["connections"], 1);
    drop(first);
    operator::wait_until(&scratch, |status| status["servers"][0]["connections"] == 1);
    assert_eq!(connect_from(weir.port(), limited).1, 8);
}

#[test]
fn disks_are_visible_only_to_allowed_clients() {
    need("psktool");
    let scratch = Scratch::new();
    let keys = scratch.path("keys.psk");
    for user in ["alice", "bob", "eve"] {
        TestClient::new("psktool").args(["-u", user, "-p", text(&keys)]).succeeds();
    }
    let config = format!(
        "[daemon]\nnbd = \"unix:{}\"\nqmp = \"{}\"\ntls = \"on\"\ntls-psk = \"{}\"\n\
         [disk.open]\nimage = \"memory:1M\"\n\
         [disk.of-both]\nimage = \"memory:1M\"\ntls-authz = [\"al*\", \"bob\"]\n\
         [disk.of-bob]\nimage = \"memory:1M\"\ntls-authz = \"bob\"\n",
        text(&scratch.socket("nbd")),
        operator::socket(&scratch),
        text(&keys),
    );
    let file = scratch.file("weir.toml", &config);
    let _weir = operator::serve(&scratch, &file);
    let socket = scratch.socket("nbd");
    let uri = |user: &str, disk: &str| {
        format!("nbds+unix://{user}@/{disk}?socket={}&tls-psk-file={}", text(&socket), text(&keys))
    };
    let sees = |uri: String| {
        let list = TestClient::new("nbdinfo").args(["--list", "--json", &uri]).json();
        let names = list["exports"].as_array().expect("a list").iter();
        names.map(|export| export["export-name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(sees(uri("bob", "")), ["open", "of-both", "of-bob"]);
    assert_eq!(sees(uri("alice", "")), ["open", "of-both"]);
    assert_eq!(sees(uri("eve", "")), ["open"]);
    assert_eq!(sees(format!("nbd+unix:///?socket={}", text(&socket))), ["open"], "without TLS");
    let size = |user: &str, disk: &str| TestClient::new("nbdinfo").args(["--size", &uri(user, disk)]);
    size("bob", "of-bob").succeeds();
    size("alice", "of-both").succeeds();
    size("alice", "of-bob").fails();
    size("eve", "of-both").fails();
    let stderr = size("eve", "no-such-disk").fails();
    assert_eq!(
        stderr.replace("no-such-disk", "of-bob"),
        size("eve", "of-bob").fails(),
        "both errors are equal"
    );
    assert!(refused(&scratch)["exports"].as_u64() >= Some(3), "{}", refused(&scratch));
}

#[test]
fn added_disk_keeps_its_access_rules() {
    let scratch = Scratch::new();
    let config = format!(
        "[daemon]\nnbd = \"127.0.0.1:0\"\nqmp = \"{}\"\n[disk.open]\nimage = \"memory:1M\"\n",
        operator::socket(&scratch),
    );
    let file = scratch.file("weir.toml", &config);
    let weir = operator::serve(&scratch, &file);
    let add = ["disk", "add", "mine", "memory:1M", "--deny", "127.0.0.0/8", "--save"];
    operator::run_ok(&scratch, &add);
    let size = |disk: &str| {
        let uri = format!("nbd://127.0.0.1:{}/{disk}", weir.port());
        TestClient::new("nbdinfo").args(["--size", &uri])
    };
    size("open").succeeds();
    size("mine").fails();
    assert_contains(
        &fs::read_to_string(&file).expect("the file exists"),
        &["[disk.mine]", "deny = [\"127.0.0.0/8\"]"],
    );
    // The saved file matches the running state, and a change of the file takes effect.
    assert!(!operator::run_ok(&scratch, &["reload"]).contains("mine"));
    let text = fs::read_to_string(&file).expect("the file exists").replace("127.0.0.0/8", "127.9.0.0/16");
    fs::write(&file, text).expect("the file can be written");
    operator::run_ok(&scratch, &["reload"]);
    size("mine").succeeds();
}

#[test]
fn client_names_match_subjects_in_qemu_format() {
    need("certtool");
    let script = r#"
serve_as() { serve -t --object tls-creds-x509,id=t,endpoint=server,dir="$PWD/pki",verify-peer=on --tls-creds t "$@" --tls-authz a -f raw disk.raw; }
try_connect() { nbdinfo --size "nbds+unix://localhost/?socket=$S&tls-certificates=$PWD/pki" 2>/dev/null || echo "is refused"; }
serve_as --object authz-simple,id=a,identity="C=GB,,O=Acme\\,, Inc,,CN=vm 1"; try_connect; stop
serve_as --object authz-simple,id=a,identity="CN=vm 1,,O=Acme\\,, Inc,,C=GB"; try_connect; stop
serve_as --object authz-list,id=a,policy=deny,rules.0.match="*,,CN=vm ?",rules.0.policy=allow,rules.0.format=glob; try_connect; stop
serve_as --object authz-list,id=a,policy=deny,rules.0.match="*,,CN=vm",rules.0.policy=allow,rules.0.format=glob; try_connect; stop
"#;
    let script = format!(
        "serve() {{ qemu-nbd --fork -k \"$S\" --pid-file=pid \"$@\" || echo \"did not start: $?\"; \
         }}\n{script}"
    );
    let ran = peer::compare_with_qemu("qemu-nbd", &script, |scratch| {
        scratch.filled("disk.raw", MIB);
        CertificateAuthority::new(scratch, "pki").issue_client("client", "/C=GB/O=Acme, Inc/CN=vm 1");
    });
    assert_eq!(ran.stdout.matches("is refused").count(), 2, "{}", ran.stdout);
}

#[test]
fn client_names_are_authz_objects_in_qmp() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "pki");
    let nbd = scratch.socket("nbd");
    let _weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["--blockdev", "null-co,node-name=disk,size=1048576", "--qmp", &operator::socket(&scratch)])
        // The sandbox must allow files that are added later, here the TLS keys.
        .arg("--image-root")
        .arg(scratch.path(""))
        .start();
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let add = |id: &str, name: &str| {
        json!({ "qom-type": "authz-list", "id": id, "policy": "deny",
                "rules": [{ "match": name, "policy": "allow", "format": "exact" }] })
    };
    qmp.command("object-add", add("us", "CN=client"));
    qmp.command("object-add", add("them", "CN=them"));
    qmp.command_error("object-add", add("us", "CN=other"));
    qmp.command(
        "object-add",
        json!({ "qom-type": "tls-creds-x509", "id": "tls", "endpoint": "server", "dir": authority.path() }),
    );
    let addr = json!({ "type": "unix", "data": { "path": text(&nbd) } });
    let serve = |names: &str| json!({ "addr": addr, "tls-creds": "tls", "tls-authz": names });
    let (_, message) = qmp.command_error("nbd-server-start", serve("absent"));
    assert_contains(&message, &["No authorization object with id 'absent'"]);
    let export = json!({ "type": "nbd", "id": "e", "node-name": "disk" });
    let uri =
        format!("nbds+unix://localhost/disk?socket={}&tls-certificates={}", text(&nbd), authority.path());
    for (names, accepted) in [("us", true), ("them", false)] {
        qmp.command("nbd-server-start", serve(names));
        qmp.command("block-export-add", export.clone());
        let client = TestClient::new("nbdinfo").args(["--size", &uri]);
        if accepted {
            client.succeeds()
        } else {
            client.fails()
        };
        let refused = &qmp.command("x-weir-query-status", json!({}))["servers"][0]["refused"]["names"];
        assert_eq!(*refused, u64::from(!accepted));
        qmp.command("nbd-server-stop", json!({}));
    }
    qmp.command("object-del", json!({ "id": "them" }));
}

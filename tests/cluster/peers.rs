//! Hosts that reach each other while etcd is unreachable, restored or replaced.

use std::{cell::Cell, fs, net::TcpListener, time::Instant};

use nix::sys::signal::Signal;

use super::{ClusterTestHost, EtcdServer, stop, sum, until};
use crate::{
    harness::{Scratch, TestClient, assert_contains, text},
    tls::CertificateAuthority,
};

const LIMIT: u64 = 3000;
/// 20 % of the limit in equal shares.
const FALLBACK: u64 = 199;

/// Hosts with addresses of their own, and one port: the sandbox distinguishes ports only.
fn start(etcd: &EtcdServer, count: usize) -> Vec<ClusterTestHost> {
    start_with(etcd, count, "")
}

/// [`start`], with further keys of `[cluster]`.
fn start_with(etcd: &EtcdServer, count: usize, more: &str) -> Vec<ClusterTestHost> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let hosts = (1..=count).map(|number| {
        let scratch = Scratch::new();
        let peer = format!("peer-address = \"127.0.0.{number}:{port}\"\n{more}");
        let file = ClusterTestHost::config(&scratch, &format!("host{number}"), &etcd.url(), &peer);
        let control = scratch.socket("control");
        let weir = Some(ClusterTestHost::serve(&scratch, &file, &control).start());
        ClusterTestHost { scratch, weir, control }
    });
    let hosts: Vec<_> = hosts.collect();
    until("all have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    until("all are connected", || {
        hosts.iter().all(|host| host.cluster()["connected-peers"] == count as u64 - 1)
    });
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", &LIMIT.to_string()]).succeeds();
    until("the limit is divided", || {
        hosts.iter().all(|host| host.quota() > FALLBACK) && sum(&hosts) > LIMIT * 9 / 10
    });
    hosts
}

/// The address in the config file of a host.
fn peer_address(host: &ClusterTestHost) -> String {
    let config = fs::read_to_string(host.scratch.path("weir.toml")).unwrap();
    config.split("peer-address = \"").nth(1).unwrap().split('"').next().unwrap().to_owned()
}

/// True if all hosts work by agreement of this number of hosts.
fn have_agreed(hosts: &[ClusterTestHost], count: u64) -> bool {
    hosts.iter().all(|host| host.status()["cluster"]["agreement"]["agreed-hosts"] == count)
}

/// Awaits `condition`, and prints the least and largest sum of the quotas in force. Quotas are read
/// one after another, and each counts only if none has changed meanwhile.
///
/// # Panics
/// If the sum is more than the limit.
#[track_caller]
fn watch(label: &str, hosts: &[ClusterTestHost], condition: impl Fn() -> bool) {
    let [least, largest] = [u64::MAX, 0].map(Cell::new);
    let parts = || hosts.iter().map(ClusterTestHost::quota).collect::<Vec<_>>();
    let began = Instant::now();
    until(label, || {
        let (before, after) = (parts(), parts());
        if before == after {
            let sum = after.iter().sum();
            least.set(least.get().min(sum));
            largest.set(largest.get().max(sum));
        }
        assert!(largest.get() <= LIMIT, "{} of {LIMIT} in force: {label}", largest.get());
        condition()
    });
    let took = began.elapsed().as_secs_f64();
    let [least, largest] = [least.get(), largest.get()];
    println!("{label}: least sum {least}, worst sum {largest}, of {LIMIT}, after {took:.1} s");
}

#[test]
fn hosts_keep_their_quotas_without_etcd_and_fall_back_alone() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let hosts = start(&etcd, 3);
    let clients: Vec<_> = hosts.iter().map(ClusterTestHost::read).collect();
    until("the quotas settle", || sum(&hosts) > LIMIT * 9 / 10);
    etcd.kill();
    watch("etcd is gone, and the hosts agree", &hosts, || have_agreed(&hosts, 3));
    // Longer than a lease: every quota was granted again without etcd. A lower sum begins the time
    // again, since a loaded computer may delay renewals.
    let window = 2 * policy::cluster::Timing::DEFAULT.lease;
    let since = Cell::new(Instant::now());
    watch("two leases without etcd and without a gap", &hosts, || {
        if sum(&hosts) < LIMIT * 9 / 10 {
            since.set(Instant::now());
        }
        since.get().elapsed() >= window
    });
    until("all hosts follow the agreement", || have_agreed(&hosts, 3));
    let shown = hosts[1].run(&["cluster", "status"]).succeeds();
    assert!(shown.contains("by agreement of 3 hosts, host1 leads"), "{shown}");
    hosts[2].weir().wait_for_log("this host keeps its quota by agreement of 3 hosts");
    // A host that does not answer ends the agreement.
    hosts[2].weir().signal(Signal::SIGSTOP);
    let fallback = || hosts[..2].iter().all(|host| host.quota() == FALLBACK);
    until("the others fall back", fallback);
    hosts[0].weir().wait_for_log("host3 does not answer");
    hosts[2].weir().signal(Signal::SIGCONT);
    watch("the third host answers again", &hosts, || have_agreed(&hosts, 3));
    watch("the limit is divided again", &hosts, || sum(&hosts) > LIMIT * 9 / 10);
    etcd.restart();
    let connected = || hosts.iter().all(|host| host.status()["cluster"]["connected"] == true);
    watch("etcd is back", &hosts, connected);
    watch("etcd divides the limit", &hosts, || {
        hosts.iter().any(|host| host.cluster()["leader"].is_string()) && sum(&hosts) > LIMIT * 9 / 10
    });
    clients.into_iter().for_each(stop);
}

#[test]
fn an_etcd_with_other_data_exceeds_nothing() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let hosts = start(&etcd, 2);
    etcd.kill();
    watch("etcd is gone, and the hosts agree", &hosts, || have_agreed(&hosts, 2));
    fs::remove_dir_all(scratch.path("etcd")).unwrap();
    etcd.restart();
    let connected = || hosts.iter().all(|host| host.status()["cluster"]["connected"] == true);
    watch("another etcd is there", &hosts, connected);
    hosts[0].weir().wait_for_log("etcd was restored from an older copy");
    watch("the limit is divided again", &hosts, || {
        hosts.iter().any(|host| host.cluster()["leader"].is_string()) && sum(&hosts) > LIMIT * 9 / 10
    });
}

/// Bytes of a peer are refused without harm: the daemon serves on.
#[test]
fn garbage_from_a_peer_is_refused() {
    use std::io::{Read as _, Write as _};
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let hosts = start(&etcd, 2);
    let address = peer_address(&hosts[0]);
    let greeting = |from: &str| {
        format!("{{\"version\":1,\"cluster\":\"lab\",\"from\":\"{from}\",\"to\":\"host1\"}}\n").into_bytes()
    };
    let ask = b"{\"type\":\"ask\",\"nonce\":1,\"number\":1,\"members\":[\"host1\"],\"leads\":true}\n";
    let long = vec![b'x'; 1 << 20];
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"\n\n\n".to_vec(),
        vec![0xff; 4096],
        greeting("host1"),
        [greeting("host9"), long.clone()].concat(),
        [greeting("host9"), b"{\"type\":\"what\"}\n".to_vec()].concat(),
        long,
    ] {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        // The daemon may close the connection while it is written to.
        let _ = stream.write_all(&bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
    // Requests of an unknown host change nothing: the two hosts agree.
    etcd.kill();
    let stream = std::net::TcpStream::connect(&address).unwrap();
    (&stream).write_all(&greeting("host9")).unwrap();
    watch("the hosts agree", &hosts, || {
        // The daemon keeps the connection: a request is valid from any sender.
        (&stream).write_all(ask).unwrap();
        have_agreed(&hosts, 2)
    });
}

/// With TLS, hosts agree, and a client without a certificate is not heard.
#[test]
fn hosts_connect_with_certificates() {
    use std::io::{Read as _, Write as _};
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    authority.issue_server(&["127.0.0.1", "127.0.0.2"]);
    let mut etcd = EtcdServer::start_with_tls(&scratch, &authority);
    let hosts = start_with(&etcd, 2, &format!("certificates = \"{}\"", authority.path()));
    etcd.kill();
    watch("etcd is gone, and the hosts agree", &hosts, || have_agreed(&hosts, 2));
    let address = peer_address(&hosts[0]);
    let mut stream = std::net::TcpStream::connect(&address).unwrap();
    let greeting = "{\"version\":1,\"cluster\":\"lab\",\"from\":\"host2\",\"to\":\"host1\"}\n";
    let _ = stream.write_all(greeting.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"{"), "{answer:?}");
    let anonymous = authority.without_client(&scratch, "anonymous");
    let output = TestClient::new("openssl")
        .args(["s_client", "-quiet", "-connect", &address, "-CAfile", text(&anonymous.join("ca-cert.pem"))])
        .with_stdin(greeting)
        .run();
    assert_contains(&output.stderr(), &["certificate required"]);
    assert!(have_agreed(&hosts, 2));
}

/// The new process of an upgrade listens at the address of the old one, and the other hosts connect
/// with it.
#[test]
fn an_upgrade_keeps_the_address() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let mut hosts = start(&etcd, 2);
    let file = hosts[0].scratch.path("weir.toml");
    let new = ClusterTestHost::serve(&hosts[0].scratch, &file, &hosts[0].control).arg("--takeover").start();
    let (status, log) = hosts[0].weir.replace(new).unwrap().wait();
    assert!(status.success(), "{status}: {log}");
    until("the new process has joined", || hosts[0].cluster()["joined"] == true);
    until("both are connected", || hosts.iter().all(|host| host.cluster()["connected-peers"] == 1));
    watch("the limit is divided again", &hosts, || sum(&hosts) > LIMIT * 9 / 10);
    etcd.kill();
    watch("etcd is gone, and the hosts agree", &hosts, || have_agreed(&hosts, 2));
    watch("the hosts keep their quotas", &hosts, || sum(&hosts) > LIMIT * 9 / 10);
}

//! Cluster-wide limits: three daemons and Debian's etcd, which is stopped, killed and restarted; a
//! leader that is killed, a daemon that is suspended.
//!
//! The tests compare states: the quota of each host as etcd and the daemons report it, and that the
//! quotas in force never exceed the limit. The work admitted by all daemons is bounded by the limit
//! over the elapsed time, which holds on slow machines as well. Never asserts how fast quotas
//! follow demand, nor that a rate is reached.

mod authentication;
mod etcd_keys;
mod peers;
mod reservations;
mod status;

use std::{
    fs,
    io::{Read as _, Write as _},
    iter,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{
    DEADLINE, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, need, search_path, text, weir,
};
use crate::tls::CertificateAuthority;

/// An etcd member on loopback, with its data in the scratch directory.
pub(crate) struct EtcdServer {
    child: Child,
    data: PathBuf,
    ports: [u16; 2],
    /// Directory of its certificates, if its clients use TLS.
    certificates: Option<PathBuf>,
}

impl EtcdServer {
    pub(crate) fn start(scratch: &Scratch) -> Self {
        Self::start_with(scratch, None)
    }

    /// Starts one that requires certificates of its clients, with those of this authority.
    fn start_with_tls(scratch: &Scratch, authority: &CertificateAuthority) -> Self {
        Self::start_with(scratch, Some(authority.path().into()))
    }

    fn start_with(scratch: &Scratch, certificates: Option<PathBuf>) -> Self {
        need("etcd");
        // Free at this moment; if another process binds it first, etcd reports that.
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (data, ports) = (scratch.path("etcd"), [free(), free()]);
        let child = Self::spawn(&data, ports, certificates.as_deref());
        let etcd = Self { child, data, ports, certificates };
        etcd.wait();
        etcd
    }

    fn spawn(data: &Path, [client, peer]: [u16; 2], certificates: Option<&Path>) -> Child {
        let scheme = if certificates.is_some() { "https" } else { "http" };
        let url = |port| format!("http://127.0.0.1:{port}");
        let client = format!("{scheme}://127.0.0.1:{client}");
        let log = fs::File::create(data.with_extension("log")).unwrap();
        let mut etcd = Command::new("etcd");
        if let Some(directory) = certificates {
            let file = |name: &str| directory.join(name);
            etcd.arg("--client-cert-auth").arg("--trusted-ca-file").arg(file("ca-cert.pem"));
            etcd.arg("--cert-file").arg(file("server-cert.pem"));
            etcd.arg("--key-file").arg(file("server-key.pem"));
        }
        etcd.env("PATH", search_path())
            .args([
                "--data-dir",
                text(data),
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)])
            .args(["--initial-cluster", &format!("default={}", url(peer))])
            // Password hashes are slow on purpose, which delays a busy machine.
            .args(["--bcrypt-cost", "4"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("it was found")
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.ports[0])
    }

    pub(crate) fn control(&self, arguments: &[&str]) -> TestClient {
        let mut etcdctl = TestClient::new("etcdctl").env("ETCDCTL_API", "3");
        if let Some(directory) = &self.certificates {
            let file = |name: &str| text(&directory.join(name)).to_owned();
            etcdctl = etcdctl
                .args(["--cacert", &file("ca-cert.pem"), "--cert", &file("client-cert.pem")])
                .args(["--key", &file("client-key.pem")]);
        }
        etcdctl.args(["--endpoints", &self.url()]).args(arguments)
    }

    fn wait(&self) {
        until("etcd answers", || self.control(&["get", "x"]).run().status() == Some(0));
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.child = Self::spawn(&self.data, self.ports, self.certificates.as_deref());
        self.wait();
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
pub(crate) fn until(label: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "the condition did not become true: {label}");
        // A condition asks several daemons.
        thread::sleep(Duration::from_millis(20));
    }
}

struct ClusterTestHost {
    scratch: Scratch,
    weir: Option<Weir>,
    control: PathBuf,
}

impl ClusterTestHost {
    fn config(scratch: &Scratch, name: &str, etcd: &str, more: &str) -> PathBuf {
        let (nbd, state) = (scratch.socket("nbd"), scratch.path("state"));
        scratch.file(
            "weir.toml",
            format!(
                "[daemon]\n\
                 nbd = \"unix:{}\"\n\
                 state = \"{}\"\n\
                 [cluster]\n\
                 name = \"lab\"\n\
                 host = \"{name}\"\n\
                 etcd = \"{etcd}\"\n\
                 {more}\n\
                 [group.gold]\n\
                 cluster = true\n\
                 [disk.vm]\n\
                 image = \"null:16M\"\n\
                 group = \"gold\"\n",
                text(&nbd),
                text(&state)
            ),
        )
    }

    fn serve(scratch: &Scratch, file: &Path, control: &Path) -> Serve {
        let control = format!("unix:{}", text(control));
        Serve::new(scratch).at_given_addresses().args(["--config", text(file), "--qmp", &control])
    }

    fn start(name: &str, etcd: &EtcdServer) -> Self {
        let scratch = Scratch::new();
        let file = Self::config(&scratch, name, &etcd.url(), "");
        let control = scratch.socket("control");
        let weir = Some(Self::serve(&scratch, &file, &control).start());
        Self { scratch, weir, control }
    }

    fn restart(&mut self) {
        let file = self.scratch.path("weir.toml");
        self.weir = Some(Self::serve(&self.scratch, &file, &self.control).start());
    }

    fn weir(&self) -> &Weir {
        self.weir.as_ref().unwrap()
    }

    fn run(&self, arguments: &[&str]) -> TestClient {
        let control = format!("unix:{}", text(&self.control));
        weir(arguments).args(["--qmp", &control])
    }

    fn cluster(&self) -> Value {
        self.run(&["cluster", "status", "--json"]).json()
    }

    /// Over QMP, because the conditions that the tests await ask for it constantly, and starting a
    /// program each time would keep a processor busy.
    fn status(&self) -> Value {
        Qmp::negotiated(&self.control).command("x-weir-query-status", json!({}))
    }

    /// The quota in force on this host: the rate of its buckets.
    fn quota(&self) -> u64 {
        let status = self.status();
        status["groups"][0]["limits"]["iops-total"].as_u64().unwrap_or(u64::MAX)
    }

    fn admitted(&self) -> u64 {
        let status = self.status();
        status["groups"][0]["throttle"]["reads"]["requests"].as_u64().expect("a counter")
    }

    /// Starts a client that reads as fast as possible until it is killed.
    fn read(&self) -> Child {
        let uri = format!("nbd+unix:///?socket={}", text(&self.scratch.socket("nbd")));
        Command::new("fio")
            .env("PATH", search_path())
            .args([
                "--name=a",
                "--ioengine=nbd",
                "--rw=randread",
                "--bs=4k",
                "--iodepth=16",
                "--time_based",
                "--runtime=3600",
            ])
            .arg(format!("--uri={uri}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

fn leader_of(host: &ClusterTestHost) -> Option<String> {
    host.cluster()["leader"].as_str().map(str::to_owned)
}

fn stop(mut client: Child) {
    let _ = client.kill();
    let _ = client.wait();
}

/// Sum of the quotas in force, each as reported by its own daemon. The values belong to one
/// instant, since each is the same before and after all others were read.
#[track_caller]
fn sum(hosts: &[ClusterTestHost]) -> u64 {
    let parts = || hosts.iter().map(ClusterTestHost::quota).collect::<Vec<_>>();
    let (mut before, end) = (parts(), Instant::now() + DEADLINE);
    loop {
        let after = parts();
        if before == after {
            return after.iter().sum();
        }
        assert!(Instant::now() < end, "quotas do not settle: {before:?}, {after:?}");
        before = after;
    }
}

/// Requests admitted by all hosts in a period, compared with a limit in operations per second.
struct AdmissionBound {
    rate: u64,
    since: Instant,
    before: u64,
}

impl AdmissionBound {
    fn begin(hosts: &[ClusterTestHost], rate: u64) -> Self {
        let since = Instant::now();
        Self { rate, since, before: hosts.iter().map(ClusterTestHost::admitted).sum() }
    }

    #[track_caller]
    fn end(self, hosts: &[ClusterTestHost]) {
        let passed = hosts.iter().map(ClusterTestHost::admitted).sum::<u64>() - self.before;
        let burst = self.rate / 10;
        // Each host may overrun its bucket by one request.
        let max = self.rate as f64 * self.since.elapsed().as_secs_f64() + (burst + hosts.len() as u64) as f64;
        assert!(passed as f64 <= max, "{passed} were admitted, at most {max} are permitted");
        assert!(passed > 0);
    }
}

#[test]
fn quotas_follow_demand_through_loss_of_leader_and_etcd() {
    need("fio");
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let mut hosts: Vec<_> = ["a", "b", "c"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("a host leads", || leader_of(&hosts[2]).is_some());
    let stdout = hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "2000"]).succeeds();
    assert!(stdout.contains("iops-total: none → 2000, on all hosts"), "{stdout}");
    until("all hosts have a quota", || hosts.iter().all(|host| host.quota() < 2000));
    let watched = AdmissionBound::begin(&hosts, 2000);
    // A single busy host has nearly all.
    let first = hosts[0].read();
    // The fallback shares of the others are a fifteenth each.
    until("the busy host has eight tenths", || hosts[0].quota() > 1650);
    assert!(sum(&hosts) <= 2000);
    // A second busy host gets half.
    let second = hosts[1].read();
    until("both busy hosts have half of the limit", || {
        [hosts[0].quota(), hosts[1].quota()].iter().all(|part| (900..1100).contains(part))
    });
    assert!(sum(&hosts) <= 2000);
    watched.end(&hosts);
    // A change made on one host applies to all.
    hosts[2].run(&["throttle", "gold", "--cluster", "--iops-total", "1000"]).succeeds();
    until("both busy hosts have half of the new limit", || {
        hosts[..2].iter().all(|host| (450..550).contains(&host.quota()))
    });
    // The leader is killed: another host takes over the distribution.
    let leader = leader_of(&hosts[2]).unwrap();
    let at = ["a", "b", "c"].iter().position(|name| *name == leader).unwrap();
    hosts[at].weir.take().unwrap().crash();
    let witness = (at + 1) % 3;
    until("another host leads", || leader_of(&hosts[witness]).is_some_and(|name| name != leader));
    hosts[witness].run(&["throttle", "gold", "--cluster", "--iops-total", "1500"]).succeeds();
    hosts[at].restart();
    let change =
        |host: &ClusterTestHost| host.status()["groups"][0]["cluster"]["limits"]["iops-total"].as_u64();
    until("all hosts have the new limit", || hosts.iter().all(|host| change(host) == Some(1500)));
    assert!(sum(&hosts) <= 1500);
    let watched = AdmissionBound::begin(&hosts, 1500);
    // Without etcd each host falls back to its share, logs that, and recovers.
    let mut events = Qmp::negotiated(&hosts[witness].control);
    etcd.kill();
    until("all hosts use their fallback share", || hosts.iter().all(|host| host.quota() <= 1500 / 15));
    let event = iter::repeat_with(|| events.event("X_WEIR_EVENT"))
        .find(|candidate| candidate["kind"] == "cluster_partitioned");
    assert_eq!(event.unwrap()["data"]["cluster"], "lab");
    hosts[witness].weir().wait_for_log("the fallback share applies");
    assert_eq!(hosts[witness].status()["cluster"]["connected"], false);
    // The last known state is shown, with its age.
    let shown = hosts[witness].cluster();
    assert!(shown["known-ms-ago"].is_u64(), "{shown}");
    assert_eq!(shown["groups"][0]["limits"]["iops-total"], 1500);
    etcd.restart();
    let busy: Vec<_> = (0..2).filter(|host| *host != at).collect();
    until("a busy host has a lease again", || busy.iter().any(|host| hosts[*host].quota() > 100));
    assert!(sum(&hosts) <= 1500);
    // A suspended daemon does not keep more than its lease allows.
    let stopped_host = (witness + 1) % 3;
    hosts[stopped_host].weir().signal(Signal::SIGSTOP);
    until("other hosts have its quota", || {
        let other_hosts = hosts.iter().enumerate().filter(|(at, _)| *at != stopped_host);
        other_hosts.map(|(_, host)| host.quota()).sum::<u64>() > 1000
    });
    hosts[stopped_host].weir().signal(Signal::SIGCONT);
    assert!(sum(&hosts) <= 1500);
    watched.end(&hosts);
    stop(first);
    stop(second);
}

#[test]
fn errors_are_reported_or_the_fallback_share_holds() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let start_error = |etcd: &str, more: &str| {
        let scratch = Scratch::new();
        let file = ClusterTestHost::config(&scratch, "x", etcd, more);
        ClusterTestHost::serve(&scratch, &file, &scratch.socket("control")).fails()
    };
    // A port without a listener, and no known limits of the group.
    let stderr = start_error("http://127.0.0.1:1", "");
    assert!(stderr.contains("group gold: its limits are unknown"), "{stderr}");
    let certificates = |directory: &str| {
        let stderr = start_error("https://127.0.0.1:1", &format!("certificates = \"{directory}\""));
        // OpenSSL's error strings do not help a user.
        assert!(!stderr.contains("routines"), "{stderr}");
        stderr
    };
    assert_contains(
        &certificates("/nowhere"),
        &["certificates: /nowhere: is not a directory (set `certificates` in [cluster]"],
    );
    let keys = scratch.path("keys");
    fs::create_dir(&keys).unwrap();
    let stderr = certificates(text(&keys));
    assert_contains(&stderr, &["keys/ca-cert.pem: No such file", "the certificate of etcd's authority"]);
    fs::write(keys.join("ca-cert.pem"), "garbage").unwrap();
    assert_contains(&certificates(text(&keys)), &["keys/ca-cert.pem: contains no certificate in PEM format"]);
    for (groups, expect) in [
        ("[\"gold\"]", "has disks, and [cluster] names it in control-groups"),
        ("[\"a\", \"a\"]", "is given twice"),
        ("[\"silver\"]", ": cluster: control-groups needs cgroup-limits"),
    ] {
        let stderr = start_error("http://127.0.0.1:1", &format!("control-groups = {groups}"));
        assert!(stderr.contains(expect), "{stderr}");
    }
    // `check-config` reports the error before a start.
    let host_scratch = Scratch::new();
    let file = ClusterTestHost::config(
        &host_scratch,
        "x",
        &etcd.url(),
        "peer-address = \"127.0.0.1:7441\"\nuser = \"u\"\npassword-file = \"/nowhere\"",
    );
    let stderr = weir(&["check-config", text(&file)]).fails();
    let prefix = format!("weir: {}:", text(&file));
    assert!(stderr.starts_with(&prefix), "{stderr}");
    assert!(stderr.contains(": cluster: cluster lab: password-file /nowhere"), "{stderr}");
    // A value of a newer weir, and garbage.
    for (value, expect) in [("{\"version\":2}", "has version 2"), ("garbage", "was not written by weir")] {
        etcd.control(&["put", "/weir/v1/lab/all/group/gold", value]).succeeds();
        let stderr = start_error(&etcd.url(), "");
        assert!(stderr.contains(expect), "{stderr}");
    }
    etcd.control(&["del", "/weir/v1/lab/all/group/gold"]).succeeds();
    // Two hosts with one name: the second does not join.
    let host = ClusterTestHost::start("x", &etcd);
    until("the host has joined", || host.cluster()["joined"] == true);
    host.run(&["throttle", "gold", "--cluster", "--iops-total", "2000"]).succeeds();
    let other = ClusterTestHost::start("x", &etcd);
    other.weir().wait_for_log("the name \"x\" is taken in cluster \"lab\"");
    assert_eq!(other.status()["cluster"]["connected"], false);
    assert_eq!(other.quota(), 2000 / 5);
    // Cluster-wide limits cannot be set for a disk or an invalid group name; a probable typo is
    // reported.
    let set = |name: &str| host.run(&["throttle", name, "--cluster", "--iops-total", "2000"]).run();
    for (name, expect) in [("vm", "vm: is a disk here"), ("..", "the name has a special meaning in paths")] {
        let output = set(name);
        assert!(output.status() == Some(1) && output.stderr().contains(expect), "{}", output.stderr());
    }
    let output = set("golf");
    assert!(output.status() == Some(0) && output.stderr().contains("no host has it"), "{}", output.stderr());
    assert!(!set("gold").stderr().contains("no host has it"), "this host has the group");
    host.run(&["throttle", "gold", "--cluster", "--fallback-share", "0.125%"]).succeeds();
    let shown = || host.run(&["throttle", "gold", "--cluster"]).succeeds();
    until("the command prints the new settings", || {
        shown().ends_with("  iops-total      2000\n  hosts           1\n  fallback-share  0.125%\n")
    });
    let stdout = host.run(&["throttle", "gold", "--cluster", "--fallback-share", "default"]).succeeds();
    assert_eq!(stdout, "gold: fallback-share: 0.125% → default, on all hosts\n");
    // A warning: most of the limit would be reserved for hosts that do not exist.
    let shares = ["--hosts", "16", "--fallback-share", "5%"];
    let outcome = host.run(&[&["throttle", "gold", "--cluster"], &shares[..]].concat()).run();
    let stdout = "gold: hosts: 1 → 16, on all hosts\ngold: fallback-share: 5%, on all hosts\n";
    assert_eq!((outcome.status(), &*outcome.stdout()), (Some(0), stdout));
    assert_contains(
        &outcome.stderr(),
        &["fallback shares reserve 80% of its limits, 5% for each of 16 hosts", "--hosts"],
    );
    host.run(&["throttle", "gold", "--cluster", "--fallback-share", "default"]).succeeds();
    until("the defaults are shown", || shown().ends_with("  iops-total  2000\n  hosts       16\n"));
    let output = host.run(&["throttle", "gold", "--cluster", "--fallback-share", "2"]).run();
    assert_contains(&output.stderr(), &["such as 2%", "or default"]);
    // Limits of a cluster-wide group cannot be changed on one host alone.
    let stderr = host.run(&["throttle", "gold", "--iops-total", "5"]).fails();
    assert!(stderr.contains("--cluster"), "{stderr}");
    // Garbage among grants and reports does no harm.
    etcd.control(&["put", "/weir/v1/lab/report/y", "garbage"]).succeeds();
    etcd.control(&["put", "/weir/v1/lab/host/x/grant", "garbage"]).succeeds();
    host.weir().wait_for_log("was not written by weir");
    until("the host continues to lead", || host.cluster()["leader"] == "x");
    drop(etcd);
}

#[test]
fn check_contacts_etcd_like_a_start() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let host_scratch = Scratch::new();
    let (state, socket) = (host_scratch.path("state"), host_scratch.socket("control"));
    let config = |members: &str, more: &str| {
        let more = format!("peer-address = \"127.0.0.1:7441\"\n{more}");
        let file = ClusterTestHost::config(&host_scratch, "x", "MEMBERS", &more);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("\"MEMBERS\"", members)).unwrap();
        file
    };
    let check = |file: &PathBuf| weir(&["check-config", text(file)]).run();
    let alive = format!("[{:?}]", etcd.url());
    let nobody = "[\"http://127.0.0.1:1\"]";
    let half = format!("[\"http://127.0.0.1:1\", {:?}]", etcd.url());
    // The limits are unknown; the check reports that as a start would.
    let outcome = check(&config(nobody, ""));
    assert_eq!(outcome.status(), Some(1));
    assert!(
        outcome.stderr().starts_with(&format!("weir: {}:", text(&host_scratch.path("weir.toml")))),
        "{}",
        outcome.stderr()
    );
    let expect = "group gold: its limits are unknown: etcd http://127.0.0.1:1: Connection refused";
    assert_contains(&outcome.stderr(), &[": cluster: cluster lab: ", expect]);
    // One reachable member is sufficient; the unreachable one is reported as a warning.
    let outcome = check(&config(&half, ""));
    assert_eq!(outcome.status(), Some(0), "{}", outcome.stderr());
    assert_contains(&outcome.stdout(), &["it would start, with 1 warning"]);
    let expect = "cluster lab: etcd http://127.0.0.1:1: Connection refused";
    assert_contains(&outcome.stderr(), &[expect, "a start uses another member"]);
    assert_contains(&check(&config(&alive, "")).stdout(), &["no errors"]);
    assert!(!state.exists(), "a check leaves no trace");
    // Errors of a start: a wrong password, and invalid values in etcd.
    for arguments in ["user add root:secret", "user grant-role root root", "auth enable"] {
        etcd.control(&arguments.split(' ').collect::<Vec<_>>()).succeeds();
    }
    let password = host_scratch.file("password", "wrong\n");
    let more = format!("user = \"root\"\npassword-file = \"{}\"", text(&password));
    let outcome = check(&config(&half, &more));
    assert_eq!(outcome.status(), Some(1));
    assert_contains(
        &outcome.stderr(),
        &["rejects the user and password of [cluster]", "127.0.0.1:1: Connection refused"],
    );
    etcd.control(&["--user", "root:secret", "auth", "disable"]).succeeds();
    etcd.control(&["put", "/weir/v1/lab/all/group/gold", "garbage"]).succeeds();
    assert_contains(
        &check(&config(&alive, "")).stderr(),
        &["group gold: the value at", "was not written by weir"],
    );
    etcd.control(&["del", "/weir/v1/lab/all/group/gold"]).succeeds();
    // The last known limits are sufficient for a start without etcd.
    let file = config(&alive, "");
    ClusterTestHost::serve(&host_scratch, &file, &socket).start().stop();
    etcd.kill();
    let outcome = check(&file);
    assert_eq!(outcome.status(), Some(0), "{}", outcome.stderr());
    let reason = format!("cluster lab: etcd {}: Connection refused", etcd.url());
    assert_contains(
        &outcome.stderr(),
        &[&reason, "a start uses the fallback share of the last known limits"],
    );
}

/// Each host uses its fallback share as soon as it has joined, so the sum of all shares must fit
/// the limit.
#[test]
fn fallback_share_shrinks_with_more_hosts() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let mut hosts = vec![ClusterTestHost::start("a", &etcd)];
    until("the host leads", || leader_of(&hosts[0]).is_some());
    let limits = ["--iops-total", "1000", "--hosts", "1", "--fallback-share", "60%"];
    hosts[0].run(&[&["throttle", "gold", "--cluster"], &limits[..]].concat()).succeeds();
    until("the limit is in force", || hosts[0].quota() <= 1000);
    hosts.push(ClusterTestHost::start("b", &etcd));
    hosts[0].weir().wait_for_log("the fallback share was too much for this number of hosts");
    let safe = |host: &ClusterTestHost| host.cluster()["groups"][0]["fallback-share-ppm"].as_u64();
    until("it is listed", || hosts.iter().all(|host| safe(host) == Some(300_000)));
    until("the limit is in force on both hosts", || sum(&hosts) <= 1000);
}

#[test]
fn invalid_etcd_member_is_skipped() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let urls = format!("http://{}\", \"{}", other.local_addr().unwrap(), etcd.url());
    thread::spawn(move || {
        for stream in other.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let page = "<html>";
            let _ = write!(stream, "HTTP/1.1 502 Bad\r\nContent-Length: {}\r\n\r\n{page}", page.len());
        }
    });
    let host = Scratch::new();
    let file = ClusterTestHost::config(&host, "x", "", "");
    let text = fs::read_to_string(&file).unwrap().replace("etcd = \"\"", &format!("etcd = [\"{urls}\"]"));
    fs::write(&file, text).unwrap();
    let control = host.socket("control");
    let weir = Some(ClusterTestHost::serve(&host, &file, &control).start());
    let host = ClusterTestHost { scratch: host, weir, control };
    until("the host has joined", || host.cluster()["joined"] == true);
}

//! Status of other hosts: changed limits, and hosts that have become unreachable.

use nix::sys::signal::Signal;

use super::{ClusterTestHost, EtcdServer, leader_of, until};
use crate::harness::Scratch;

#[test]
fn changed_limits_and_unreachable_hosts_are_reported() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let hosts: Vec<_> = ["a", "b"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("both have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "3000"]).succeeds();
    let by = |origin| format!("group gold was changed on all hosts by {origin}");
    hosts[0].weir().wait_for_log(&by("process "));
    hosts[1].weir().wait_for_log(&by("another host: iops-total 3000 (was 0)"));
    assert!(
        !hosts[0].weir().log_text().contains(&by("another")),
        "the host that made the change logs it only once, with its client"
    );
    until("both have a leader", || hosts.iter().all(|host| leader_of(host).is_some()));
    let leads_first = leader_of(&hosts[0]).as_deref() == Some("a");
    let (leader, other) = if leads_first { (&hosts[0], &hosts[1]) } else { (&hosts[1], &hosts[0]) };
    until("both hosts have a lease", || hosts.iter().all(|host| host.quota() > 100));
    let name = if leads_first { "b" } else { "a" };
    other.weir().signal(Signal::SIGSTOP);
    leader.weir().wait_for_log(&format!("host {name} is unreachable"));
    other.weir().signal(Signal::SIGCONT);
    leader.weir().wait_for_log(&format!("host {name} is reachable again"));
    assert!(
        !other.weir().log_text().contains("is unreachable: its quota"),
        "the suspended host was not the leader"
    );
}

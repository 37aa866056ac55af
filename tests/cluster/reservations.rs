//! Reservations of all hosts on one cluster-wide limit: their sum never exceeds it, whichever host
//! starts, stops or raises one.

use std::{fs, iter, thread};

use serde_json::json;

use super::{ClusterTestHost, EtcdServer, leader_of, until};
use crate::harness::{Qmp, Scratch, assert_contains};

#[test]
fn reservations_of_all_hosts_fit_the_limit() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let hosts: Vec<_> = ["a", "b"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("both have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "3000"]).succeeds();
    until("both hosts have the group", || hosts.iter().all(|host| host.quota() < 3000));
    hosts[0].run(&["throttle", "vm", "--iops-reservation", "2000"]).succeeds();
    let reserved = |host: &ClusterTestHost| host.cluster()["groups"][0]["reserved"]["iops"].as_u64();
    until("the second host has the reservation", || reserved(&hosts[1]) == Some(2000));
    until("a reservation above the remaining quota is rejected", || {
        let outcome = hosts[1].run(&["throttle", "vm", "--iops-reservation", "1500"]).run();
        outcome.status() == Some(1)
            && outcome.stderr().contains("more than the 1000 that the reservations of other hosts leave")
    });
    hosts[1].run(&["throttle", "vm", "--iops-reservation", "1000"]).succeeds();
    until("all reservations are published", || reserved(&hosts[0]) == Some(3000));
    // The limit cannot be lowered below the sum.
    let stderr = hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "2500"]).fails();
    assert!(stderr.contains("3000 is reserved on its hosts"), "{stderr}");
    // Of two concurrent reservations one is rejected.
    let reserve = |host: &ClusterTestHost, iops: &str| {
        host.run(&["throttle", "vm", "--iops-reservation", iops]).run().status() == Some(0)
    };
    for round in 0..5 {
        for host in &hosts {
            assert!(reserve(host, "0"));
        }
        until("no reservation is published", || hosts.iter().all(|host| reserved(host).is_none()));
        let done: Vec<_> = thread::scope(|scope| {
            let both: Vec<_> = hosts.iter().map(|host| scope.spawn(move || reserve(host, "2900"))).collect();
            both.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        assert!(done[0] != done[1], "round {round}: {done:?}");
        until("one reservation is published", || hosts.iter().all(|host| reserved(host) == Some(2900)));
    }
    // A reservation is published in etcd before it is in force.
    assert!(hosts.iter().all(|host| reserve(host, "0")));
    let at_etcd = || etcd.control(&["get", "--print-value-only", "/weir/v1/lab/all/promise/b"]).succeeds();
    until("no reservation is published", || {
        !at_etcd().contains("2900") && hosts.iter().all(|host| reserved(host).is_none())
    });
    let mut qmp = Qmp::negotiated(&hosts[1].control);
    let inner = json!({ "qom-type": "throttle-group", "id": "inner", "x-weir-parent": "gold", "x-weir-iops-reservation": 600 });
    qmp.command("object-add", inner);
    assert!(at_etcd().contains("[600,0]"), "{}", at_etcd());
    let more = json!({ "path": "inner", "property": "x-weir-iops-reservation", "value": 700 });
    qmp.command("qom-set", more);
    assert!(at_etcd().contains("[700,0]"), "{}", at_etcd());
    qmp.command("object-del", json!({ "id": "inner" }));
    let file = hosts[1].scratch.path("weir.toml");
    let config = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{config}iops-reservation = 2900\n")).unwrap();
    hosts[1].run(&["reload"]).succeeds();
    assert!(at_etcd().contains("[2900,0]"), "{}", at_etcd());
    let stderr = hosts[0].run(&["cluster", "forget", "b", "--json"]).fails();
    assert!(stderr.contains("host b: is running"), "{stderr}");
    // The leader logs a sum that exceeds the limit nevertheless.
    let ghost = "{\"version\":1,\"groups\":{\"gold\":[600,0]},\"capacity\":[0,0]}";
    etcd.control(&["put", "/weir/v1/lab/all/promise/ghost", ghost]).succeeds();
    let leader = leader_of(&hosts[0]).unwrap();
    let leader = &hosts[usize::from(leader == "b")];
    leader.weir().wait_for_log("its hosts reserve 3500, more than the limit of 3000");
    let shown = hosts[0].cluster();
    assert_eq!(shown["groups"][0]["overcommitted"]["iops"], 500);
    let stdout = hosts[1].run(&["cluster", "status"]).succeeds();
    assert!(stdout.contains("500 IOPS more than available"), "{stdout}");
}

/// The reservation of a host's disk in force, and the part that does not fit.
fn reservation_of(host: &ClusterTestHost) -> (Option<u64>, Option<u64>) {
    let disk = host.status()["disks"][0].clone();
    (disk["iops-reservation"].as_u64(), disk["unmet-reservation"]["iops-reservation"].as_u64())
}

/// A host whose config file has this reservation for its disk.
fn host_with_reservation(name: &str, etcd: &EtcdServer, iops: u64) -> ClusterTestHost {
    let scratch = Scratch::new();
    ClusterTestHost::config(&scratch, name, &etcd.url(), "");
    let control = scratch.socket("control");
    let host = ClusterTestHost { scratch, weir: None, control };
    write_reservation(&host, iops);
    host
}

fn write_reservation(host: &ClusterTestHost, iops: u64) {
    let file = host.scratch.path("weir.toml");
    let config = fs::read_to_string(&file).unwrap();
    let rest = config.split("iops-reservation").next().unwrap();
    fs::write(&file, format!("{rest}iops-reservation = {iops}\n")).unwrap();
}

#[test]
fn start_succeeds_with_an_unmet_reservation() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let mut a = host_with_reservation("a", &etcd, 2000);
    let mut b = host_with_reservation("b", &etcd, 1500);
    a.restart();
    until("host a has joined", || a.cluster()["joined"] == true);
    a.run(&["throttle", "gold", "--cluster", "--iops-total", "3000"]).succeeds();
    let at_etcd = |host: &str| {
        let key = format!("/weir/v1/lab/all/promise/{host}");
        etcd.control(&["get", "--print-value-only", &key]).succeeds()
    };
    until("the reservation is published", || at_etcd("a").contains("[2000,0]"));
    // Its disk is served, and the log names the unmet reservation and the reason.
    b.restart();
    assert_eq!(reservation_of(&b), (None, Some(1500)));
    let expect = ["vm: served without its iops-reservation 1500", "on other hosts: a 2000 IOPS"];
    for expect in expect {
        b.weir().wait_for_log(expect);
    }
    assert_contains(&b.run(&["status"]).succeeds(), &["UNMET RESERVATION", "iops 1500", "a 2000 IOPS"]);
    until("the status lists the reservation of host a", || {
        b.cluster()["groups"][0]["reserved-by"]["a"]["iops"] == 2000
    });
    assert_contains(&a.run(&["cluster", "status"]).succeeds(), &["reserved 2000 IOPS (a 2000 IOPS)"]);
    // A reload with the same reservation succeeds; one with a larger one is rejected.
    b.run(&["reload"]).succeeds();
    assert_eq!(reservation_of(&b), (None, Some(1500)));
    write_reservation(&b, 1600);
    assert_contains(&b.run(&["reload"]).fails(), &["disk vm", "iops-reservation: 1600"]);
    write_reservation(&b, 1500);
    // Once there is room, the reservation comes into force without a command.
    let mut events = Qmp::negotiated(&b.control);
    a.run(&["throttle", "vm", "--iops-reservation", "1000"]).succeeds();
    let in_force = iter::repeat_with(|| events.event("X_WEIR_EVENT"))
        .find(|event| event["kind"] == "reservation_in_force");
    assert_eq!(in_force.unwrap()["data"]["iops-reservation"], 1500);
    assert_eq!(reservation_of(&b), (Some(1500), None));
    assert!(at_etcd("b").contains("[1500,0]"));
    // A reservation that was set by a command is kept.
    b.run(&["throttle", "vm", "--iops-reservation", "2000"]).succeeds();
    b.weir.take().unwrap().stop();
    write_reservation(&b, 2500);
    b.restart();
    assert_eq!(reservation_of(&b), (None, Some(2500)));
    b.run(&["throttle", "vm", "--iops-reservation", "0"]).succeeds();
    assert_eq!(reservation_of(&b), (None, None));
}

#[test]
fn reservation_of_a_stopped_host_is_kept() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let (mut a, mut b) = (host_with_reservation("a", &etcd, 2000), host_with_reservation("b", &etcd, 500));
    a.restart();
    b.restart();
    until("both have joined", || [&a, &b].iter().all(|host| host.cluster()["joined"] == true));
    a.run(&["throttle", "gold", "--cluster", "--iops-total", "3000"]).succeeds();
    let by = |host: &ClusterTestHost, name: &str| {
        host.cluster()["groups"][0]["reserved-by"][name]["iops"].as_u64()
    };
    until("both reservations are published", || by(&b, "a") == Some(2000) && by(&a, "b") == Some(500));
    let raise =
        |host: &ClusterTestHost, iops: &str| host.run(&["throttle", "vm", "--iops-reservation", iops]);
    for is_crash in [false, true] {
        let weir = a.weir.take().unwrap();
        if is_crash {
            weir.crash();
        } else {
            drop(weir.stop());
        }
        assert_contains(&raise(&b, "1500").fails(), &["the 1000 that the reservations of other hosts leave"]);
        assert_eq!(by(&b, "a"), Some(2000));
        a.restart();
        assert_eq!(reservation_of(&a), (Some(2000), None));
        until("host a has joined", || a.cluster()["joined"] == true);
    }
    // The reservation of a host that will not return can be released. If the host does return, its
    // reservation does not fit.
    a.weir.take().unwrap().stop();
    until("the name of host a is free", || {
        let name = etcd.control(&["get", "--print-value-only", "/weir/v1/lab/host/a/name"]);
        name.succeeds().is_empty()
    });
    b.run(&["cluster", "forget", "a"]).succeeds();
    until("the reservation of host a is released", || by(&b, "a").is_none());
    raise(&b, "1500").succeeds();
    a.restart();
    assert_eq!(reservation_of(&a), (None, Some(2000)));
    // Without etcd the reservation is in force without a check. After the reconnection it is
    // checked, and the earlier one wins.
    a.weir.take().unwrap().stop();
    etcd.kill();
    a.restart();
    assert_eq!(reservation_of(&a), (Some(2000), None));
    etcd.restart();
    until("the reservation of host a is unmet", || reservation_of(&a) == (None, Some(2000)));
    a.weir().wait_for_log(
        "2000 would be reserved on a, but only 1500 is available; reserved in group gold on other \
         hosts: b 1500 IOPS",
    );
    assert_eq!(reservation_of(&b), (Some(1500), None));
    until("etcd has only the reservation of host b", || by(&b, "a").is_none() && by(&b, "b") == Some(1500));
    assert!(b.cluster()["groups"][0]["overcommitted"].as_object().unwrap().is_empty());
}

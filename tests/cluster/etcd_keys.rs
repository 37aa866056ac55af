//! Keys in etcd: lost and foreign values, marks of removed groups, values of a newer version, and
//! grants of hosts that have left.

use super::*;

#[test]
fn lost_or_overwritten_keys_are_restored() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let mut hosts: Vec<_> = ["a", "b"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("both have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "2000"]).succeeds();
    until("both hosts have the group", || hosts.iter().all(|host| host.quota() < 2000));
    hosts[0].run(&["throttle", "vm", "--iops-reservation", "1500"]).succeeds();
    let value_of = |etcd: &EtcdServer, key: &str| {
        let key = format!("/weir/v1/lab/{key}");
        etcd.control(&["get", "--print-value-only", &key]).succeeds()
    };
    until("the reservation is published", || value_of(&etcd, "all/promise/a").contains("1500"));
    let limits = value_of(&etcd, "all/group/gold");
    for (key, value) in [("all/group/gold", limits.trim()), ("all/promise/a", "1500")] {
        etcd.control(&["del", &format!("/weir/v1/lab/{key}")]).succeeds();
        until(key, || value_of(&etcd, key).contains(value));
    }
    let stderr = hosts[1].run(&["throttle", "vm", "--iops-reservation", "1500"]).fails();
    assert!(stderr.contains("1500"), "{stderr}");
    // Keys without a lease belong to no host, whatever their value.
    for (key, value) in [
        ("all/leader", "garbage"),
        ("all/leader", "{\"version\":1,\"host\":\"ghost\",\"nonce\":1}"),
        ("host/a/name", "garbage"),
        (
            "host/a/name",
            "{\"version\":1,\"instance\":9223372036854775807,\"machine\":\"\",\"pid\":1,\"began\":1,\"weir\":\"\"}",
        ),
    ] {
        etcd.control(&["put", &format!("/weir/v1/lab/{key}"), value]).succeeds();
        until(value, || value_of(&etcd, key).trim() != value);
        until("a host leads", || leader_of(&hosts[0]).is_some_and(|name| name != "ghost"));
        until("both hosts have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    }
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "1600"]).succeeds();
    let change =
        |host: &ClusterTestHost| host.status()["groups"][0]["cluster"]["limits"]["iops-total"].as_u64();
    until("the limit is in force on both hosts", || hosts.iter().all(|host| change(host) == Some(1600)));
    // A start without etcd, and one with an empty etcd.
    etcd.kill();
    fs::remove_dir_all(&etcd.data).unwrap();
    for etcd_is_down in [true, false] {
        hosts[1].weir.take().unwrap().crash();
        hosts[1].restart();
        assert!(hosts[1].quota() <= 1600);
        if etcd_is_down {
            hosts[1].weir.as_ref().unwrap().wait_for_log("partitioned from cluster");
            etcd.restart();
        }
    }
    until("etcd has the keys again", || value_of(&etcd, "all/group/gold").contains("1600"));
    until("quotas are leased", || hosts.iter().all(|host| host.quota() > 1600 / 5));
    assert!(sum(&hosts) <= 1600);
    // The leader restores lost keys. That does not conflict with a concurrent change: none is
    // rejected.
    let mut qmp = Qmp::negotiated(&hosts[0].control);
    for round in 0..4 {
        etcd.kill();
        until("the host is partitioned", || hosts[0].status()["cluster"]["connected"] == false);
        fs::remove_dir_all(&etcd.data).unwrap();
        etcd.restart();
        // The change is made immediately after a host has become leader, while it restores the
        // keys.
        let mut has_leader = || {
            let cluster = qmp.command("x-weir-query-status", json!({}))["cluster"].clone();
            cluster["connected"] == true && cluster["leader"].is_string()
        };
        let end = Instant::now() + DEADLINE;
        while !has_leader() {
            assert!(Instant::now() < end, "no host leads");
        }
        qmp.command("x-weir-cluster-set", json!({ "group": "gold", "iops-total": 2000 + round }));
    }
}

/// The value of a key of the cluster; empty if the key does not exist.
fn etcd_value(etcd: &EtcdServer, key: &str) -> String {
    let key = format!("/weir/v1/lab/{key}");
    etcd.control(&["get", "--print-value-only", &key]).succeeds().trim_end().to_owned()
}

fn write_to(etcd: &EtcdServer, key: &str, value: &str) {
    etcd.control(&["put", &format!("/weir/v1/lab/{key}"), value]).succeeds();
}

#[test]
fn removed_group_is_not_restored() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let mut hosts: Vec<_> = ["a", "b"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("both have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    let set = |host: &ClusterTestHost, group: &str| {
        host.run(&["throttle", group, "--cluster", "--iops-total", "2000"]).run().succeeded()
    };
    for group in ["gold", "golf", "silver"] {
        set(&hosts[0], group);
    }
    let groups = |host: &ClusterTestHost| {
        let shown = host.cluster()["groups"].clone();
        let names = shown.as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    until("both hosts have all values", || {
        hosts.iter().all(|host| groups(host) == ["gold", "golf", "silver"])
    });
    let remove = |host: &ClusterTestHost, group: &str| host.run(&["group", "remove", group, "--cluster"]);
    // A group in use on this host, one in use on another host, and an unknown one.
    assert_contains(&remove(&hosts[0], "gold").fails(), &["group gold: in use on a (remove [group.gold]"]);
    let file = hosts[1].scratch.path("weir.toml");
    let config = fs::read_to_string(&file).unwrap();
    fs::write(&file, config + "[group.silver]\ncluster = true\n").unwrap();
    hosts[1].run(&["reload"]).succeeds();
    until("the second host has published the group", || {
        etcd_value(&etcd, "all/promise/b").contains("silver")
    });
    assert_contains(
        &remove(&hosts[0], "silver").fails(),
        &["group silver: in use on b (remove [group.silver]"],
    );
    assert_contains(
        &remove(&hosts[0], "none").fails(),
        &["group none: cluster \"lab\" has no group of this name"],
    );
    // A hint instead of an option that does not exist.
    let outcome = hosts[0].run(&["group", "add", "bronze", "--cluster"]).run();
    assert_eq!(outcome.status(), Some(2));
    assert_contains(&outcome.stderr(), &["add [group.bronze] with cluster = true", "weir reload"]);
    // The mistyped group is removed, and no leader restores it.
    assert_eq!(remove(&hosts[0], "golf").succeeds(), "group golf: removed\n");
    assert_contains(&remove(&hosts[0], "golf").fails(), &["has no group of this name"]);
    until("both hosts have removed the group", || {
        hosts.iter().all(|host| groups(host) == ["gold", "silver"])
    });
    // A host with the group in its config that was stopped meanwhile starts from the fallback share
    // and restores nothing, although it leads now and had the limits in its state.
    hosts[1].weir.take().unwrap().stop();
    assert_eq!(remove(&hosts[0], "silver").succeeds(), "group silver: removed\n");
    let removed = etcd_value(&etcd, "all/group/silver");
    assert!(removed.contains("\"removed\":true"), "{removed}");
    hosts[0].weir.take().unwrap().stop();
    hosts[1].restart();
    hosts[1].weir().wait_for_log("limits for this group yet (`weir throttle silver --cluster");
    until("the host leads", || leader_of(&hosts[1]).as_deref() == Some("b"));
    let reader = hosts[1].read();
    until("quotas are leased", || hosts[1].quota() > 2000 / 5);
    stop(reader);
    assert_eq!(etcd_value(&etcd, "all/group/silver"), removed);
    assert_eq!(groups(&hosts[1]), ["gold"]);
    let limit = || {
        let status = hosts[1].status();
        let silver = status["groups"].as_array().unwrap().iter().find(|group| group["name"] == "silver");
        silver.unwrap()["limits"]["iops-total"].as_u64()
    };
    assert_eq!(limit(), None);
    etcd.kill();
    until("the host is partitioned", || hosts[1].status()["cluster"]["connected"] == false);
    etcd.restart();
    // The previous leader is known during the partition as well.
    until("the host leads again", || {
        let cluster = hosts[1].cluster();
        cluster["connected"] == true && cluster["leader"] == "b"
    });
    // New limits follow the removed ones.
    set(&hosts[1], "silver");
    until("the new limits are in force", || limit().is_some_and(|limit| limit <= 2000));
    assert!(etcd_value(&etcd, "all/group/silver").contains("\"number\":3"));
    assert_eq!(groups(&hosts[1]), ["gold", "silver"]);
    // Only the last removals are remembered.
    let mut qmp = Qmp::negotiated(&hosts[1].control);
    for number in 0..70 {
        let group = format!("slip{number}");
        qmp.command("x-weir-cluster-set", json!({ "group": group, "iops-total": 2000 }));
        qmp.command("x-weir-cluster-remove", json!({ "group": group }));
    }
    let entries = etcd.control(&["get", "--prefix", "/weir/v1/lab/all/group/"]).succeeds();
    assert_eq!(entries.matches("\"removed\":true").count(), 64);
    assert_eq!(etcd_value(&etcd, "all/group/slip5"), "");
    assert!(!etcd_value(&etcd, "all/group/slip6").is_empty());
}

#[test]
fn values_of_a_newer_version_are_kept_and_fallback_share_holds() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let hosts: Vec<_> = ["a", "b"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("both have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "2000", "--hosts", "2"]).succeeds();
    until("both have more than the fallback share", || {
        hosts.iter().all(|host| (201..2000).contains(&host.quota()))
    });
    let understood = etcd_value(&etcd, "all/group/gold");
    let newer = "{\"version\":99,\"limits\":\"of another kind\"}";
    write_to(&etcd, "all/group/gold", newer);
    for host in &hosts {
        host.weir().wait_for_log(
            "has version 99, but this weir supports 1 (run one version on all hosts): it is ignored",
        );
    }
    until("both use their fallback share", || hosts.iter().all(|host| host.quota() == 2000 / 10));
    for host in &hosts {
        let change = host.run(&["throttle", "gold", "--cluster", "--iops-total", "1000"]);
        assert_contains(&change.fails(), &["group gold: not changed", "has version 99"]);
        assert_contains(&host.run(&["throttle", "gold", "--cluster"]).fails(), &["has version 99"]);
        assert_contains(&host.run(&["group", "remove", "gold", "--cluster"]).fails(), &["group gold"]);
        let shown = host.run(&["cluster", "status"]).succeeds();
        assert_contains(
            &shown,
            &["group gold: its state in etcd has version 99", "have their fallback shares"],
        );
        assert_eq!(host.cluster()["unreadable-groups"][0]["group"], "gold");
    }
    // A group that is unknown on this host is left alone as well.
    write_to(&etcd, "all/group/new", newer);
    until("it is listed", || hosts[0].cluster()["unreadable-groups"].as_array().map(Vec::len) == Some(2));
    let stderr = hosts[0].run(&["throttle", "new", "--cluster", "--iops-total", "1000"]).fails();
    assert_contains(&stderr, &["group new: not changed", "has version 99"]);
    for group in ["gold", "new"] {
        assert_eq!(etcd_value(&etcd, &format!("all/group/{group}")), newer);
    }
    // Once the value is understood, quotas are leased again.
    write_to(&etcd, "all/group/gold", &understood);
    until("both have more than the fallback share", || hosts.iter().all(|host| host.quota() > 200));
    assert!(sum(&hosts) <= 2000);
    hosts[1].run(&["throttle", "gold", "--cluster", "--iops-total", "1000"]).succeeds();
    // A leader key of a newer version is left alone as long as its lease lives.
    let leader = leader_of(&hosts[0]).unwrap();
    let lease = etcd.control(&["lease", "grant", "600"]).succeeds();
    let lease = lease.split_whitespace().nth(1).unwrap().to_owned();
    let key = "/weir/v1/lab/all/leader";
    etcd.control(&["put", "--lease", &lease, key, newer]).succeeds();
    let at = usize::from(leader == "b");
    hosts[at].weir().wait_for_log("this host no longer leads the cluster");
    hosts[1 - at].weir().wait_for_log("all/leader");
    assert_eq!(etcd_value(&etcd, "all/leader"), newer);
    etcd.control(&["lease", "revoke", &lease]).succeeds();
    until("a host leads and leases quotas", || {
        leader_of(&hosts[0]).is_some() && hosts.iter().all(|host| host.quota() > 25)
    });
}

#[test]
fn grants_of_departed_hosts_are_deleted() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    // Both keys predate any leader; the second host has a report, so it may return.
    write_to(&etcd, "host/ghost/grant", "{}");
    write_to(&etcd, "host/away/grant", "{}");
    write_to(&etcd, "report/away", "{}");
    let mut hosts: Vec<_> = ["a", "b"].iter().map(|name| ClusterTestHost::start(name, &etcd)).collect();
    until("both have joined", || hosts.iter().all(|host| host.cluster()["joined"] == true));
    until("the ghost's grant is deleted", || etcd_value(&etcd, "host/ghost/grant").is_empty());
    hosts[0].run(&["throttle", "gold", "--cluster", "--iops-total", "2000"]).succeeds();
    until("both have a lease", || {
        ["a", "b"].iter().all(|host| !etcd_value(&etcd, &format!("host/{host}/grant")).is_empty())
    });
    let leader = leader_of(&hosts[0]).unwrap();
    let other = hosts.remove(usize::from(leader == "a"));
    let name = if leader == "a" { "b" } else { "a" };
    other.weir.unwrap().stop();
    until("the grant of the stopped host is deleted", || {
        etcd_value(&etcd, &format!("host/{name}/grant")).is_empty()
    });
    assert_eq!(etcd_value(&etcd, "host/away/grant"), "{}");
    assert!(!etcd_value(&etcd, &format!("host/{leader}/grant")).is_empty());
    hosts[0].run(&["cluster", "forget", "away"]).succeeds();
    assert_eq!(etcd_value(&etcd, "host/away/grant"), "");
}

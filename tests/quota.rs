//! Quotas by volume: bytes of real clients are counted, a used-up quota limits them, and the count
//! survives reload, `kill -9`, upgrade and restart.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{
    MIB, Scratch, Serve, Weir, nbdsh,
    operator::{find, run_failing, run_misused, run_ok, socket, status, wait_until},
    qemu_io, text,
};

struct QuotaGroup {
    scratch: Scratch,
}

impl QuotaGroup {
    /// A disk `a` in a group `g` with these settings.
    fn new(settings: &str) -> Self {
        let group = Self { scratch: Scratch::new() };
        group.scratch.sparse("a.raw", 64 * MIB);
        group.configure(settings);
        group
    }

    fn configure(&self, settings: &str) {
        self.configure_both(settings, "");
    }

    /// With settings of the disk.
    fn configure_both(&self, settings: &str, of_disk: &str) {
        let config = format!(
            "[daemon]\nqmp = \"{}\"\nnbd = \"unix:{}\"\nstate = \"{}\"\n\
             [disk.a]\nimage = \"{}\"\nformat = \"raw\"\ngroup = \"g\"\n{of_disk}\n\
             [group.g]\n{settings}\n",
            socket(&self.scratch),
            text(&self.scratch.socket("nbd")),
            text(&self.scratch.path("state")),
            text(&self.scratch.path("a.raw"))
        );
        self.scratch.file("weir.toml", config);
    }

    fn serve(&self) -> Serve {
        let file = self.scratch.path("weir.toml");
        let serve = Serve::new(&self.scratch).at_given_addresses().arg("--config").arg(file);
        serve.env("WEIR_QMP", socket(&self.scratch))
    }

    fn upgrade(&self, old: Weir) -> Weir {
        let new = self.serve().arg("--takeover").start();
        let (status, log) = old.wait();
        assert!(status.success(), "{log}");
        new
    }

    fn group(&self) -> Value {
        find(&status(&self.scratch, "0"), "groups", "g").clone()
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///a?socket={}", text(&self.scratch.socket("nbd")))
    }

    fn write(&self, length: &str) {
        qemu_io(["-f", "raw"], [&format!("write -P 7 0 {length}")], self.uri());
    }

    /// Waits until a sample has counted this many bytes of writes.
    fn until_written(&self, written: u64) {
        wait_until(&self.scratch, |status| {
            find(status, "groups", "g")["quota-status"]["writes"]["used-bytes"].as_u64() >= Some(written)
        });
    }

    /// As [`QuotaGroup::until_written`]; returns the count of all bytes.
    fn until_used(&self, written: u64) -> u64 {
        self.until_written(written);
        self.group()["quota-status"]["total"]["used-bytes"].as_u64().expect("a count")
    }

    /// Content of the state file, empty without one.
    fn stored(&self) -> Value {
        let files = fs::read_dir(self.scratch.path("state/quota")).into_iter().flatten().flatten();
        let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
        texts.filter_map(|text| serde_json::from_str(&text).ok()).next().unwrap_or_default()
    }

    fn assert_used_up(&self, at_least: u64) {
        let group = self.group();
        assert_eq!(group["quota-status"]["used-up"], true, "{group}");
        assert_eq!(group["limits"], json!({ "bps-total": 262_144 }), "{group}");
        assert!(group["quota-status"]["total"]["used-bytes"].as_u64() >= Some(at_least), "{group}");
        let end = group["quota-status"]["total"]["period-end"].as_str().expect("an end");
        assert!(end.ends_with("-01T00:00:00+00:00"), "{end}");
    }

    fn until_used_up(&self) {
        wait_until(&self.scratch, |status| find(status, "groups", "g")["limits"]["bps-total"] == 262_144);
    }
}

const SETTINGS: &str = "time-zone = \"UTC\"\nquota = \"4M per month\"\nwrite-quota = \"1G per month\"\n\
                        quota-rate = \"256K\"";

#[test]
fn used_up_quota_limits_clients_and_survives() {
    let quota = QuotaGroup::new(SETTINGS);
    let daemon = quota.serve().start();
    quota.write("2M");
    let used = quota.until_used(2 * MIB);
    assert!((2 * MIB..3 * MIB).contains(&used), "{used}");
    assert_eq!(quota.group()["limits"], json!({}));
    quota.write("3M");
    quota.until_used_up();
    let used = quota.until_used(5 * MIB);
    quota.assert_used_up(5 * MIB);
    daemon.wait_for_log("group g has used up its quota (quota 4M per month, write-quota 1G per month)");
    let script = "
import time
h.connect_uri(arguments[0])
began = time.monotonic()
for number in range(4):
    h.pwrite(bytes(256 << 10), number << 20)
print(time.monotonic() - began)
";
    let seconds: f64 = nbdsh(script, [quota.uri()]).trim().parse().expect("seconds");
    // A tenth of a second's worth is admitted at once, and a request may exceed that.
    assert!(seconds >= 2.5, "1 MiB took {seconds:.3} s");
    let shown = run_ok(&quota.scratch, &["throttle", "g"]);
    assert!(shown.contains("quota used: ") && shown.contains("(used up)"), "{shown}");
    // An unchanged quota keeps its count, and so does a larger one, which is not used up.
    run_ok(&quota.scratch, &["reload"]);
    quota.assert_used_up(used);
    quota.configure(&SETTINGS.replace("4M", "64M"));
    run_ok(&quota.scratch, &["reload"]);
    wait_until(&quota.scratch, |status| find(status, "groups", "g")["quota-status"]["used-up"] == false);
    assert_eq!(quota.group()["limits"], json!({}));
    run_ok(&quota.scratch, &["throttle", "g", "--quota", "4M per month"]);
    quota.until_used_up();
    quota.configure(SETTINGS);
    // The count of the last sample is stored.
    let used = quota.until_used(6 * MIB);
    wait_until(&quota.scratch, |_| {
        quota.stored()["members"]["g"]["total"]["counts"][0][1].as_u64() >= Some(used)
    });
    daemon.kill();
    let daemon = quota.serve().start();
    quota.until_used_up();
    quota.assert_used_up(used);
    let daemon = quota.upgrade(daemon);
    quota.until_used_up();
    quota.assert_used_up(used);
    daemon.stop();
    let daemon = quota.serve().start();
    quota.until_used_up();
    quota.assert_used_up(used);
    daemon.stop();
}

#[test]
fn reservations_change_while_a_quota_is_used_up() {
    let quota = QuotaGroup::new(SETTINGS);
    let limited = |total: &str| format!("{SETTINGS}\nbps-total = \"{total}\"");
    let limit = |rate: u64| assert_eq!(quota.group()["limits"], json!({ "bps-total": rate }));
    quota.configure_both(&limited("100M"), "bps-reservation = \"1M\"");
    let daemon = quota.serve().start();
    quota.write("5M");
    wait_until(&quota.scratch, |status| find(status, "groups", "g")["limits"]["bps-total"] == 1 << 20);
    // The limit of the group follows the reservation of its disk, upwards and downwards.
    quota.configure_both(&limited("90M"), "bps-reservation = \"2M\"");
    run_ok(&quota.scratch, &["reload"]);
    limit(2 << 20);
    // A rejected config leaves everything as it was.
    quota.configure_both(&limited("80M"), "bps-reservation = \"81M\"");
    let refused = run_failing(&quota.scratch, &["reload"]);
    assert!(refused.contains("more than the limit of 83886080"), "{refused}");
    assert!(!refused.contains("restart weir"), "{refused}");
    limit(2 << 20);
    quota.configure(&limited("100M"));
    run_ok(&quota.scratch, &["reload"]);
    limit(262_144);
    daemon.stop();
}

#[test]
fn quota_that_a_client_sets_is_stored() {
    let quota = QuotaGroup::new("");
    let daemon = quota.serve().start();
    run_ok(&quota.scratch, &["throttle", "g", "--write-quota", "1G per month", "--quota-rate", "1M"]);
    quota.write("2M");
    quota.until_written(2 * MIB);
    // Its disk leaves the group: the last bytes are counted before.
    quota.write("3M");
    run_ok(&quota.scratch, &["throttle", "a", "--group", ""]);
    quota.until_written(5 * MIB);
    let log = daemon.stop();
    assert!(!log.contains("cannot be stored"), "{log}");
    assert_eq!(quota.stored()["members"]["g"]["writes"]["counts"][0][1], 5 * MIB);
}

#[test]
fn unusable_state_starts_at_zero() {
    let quota = QuotaGroup::new(SETTINGS);
    let daemon = quota.serve().start();
    quota.write("5M");
    quota.until_used_up();
    daemon.stop();
    let file = fs::read_dir(quota.scratch.path("state/quota")).expect("stored").next().expect("a file");
    let file = file.expect("a file").path();
    for (content, why) in
        [("{", "has no counts of quotas"), ("{\"format\": 2}", "is of another version of weir")]
    {
        fs::write(&file, content).expect("written");
        let daemon = quota.serve().start();
        assert_eq!(quota.group()["limits"], json!({}));
        let log = daemon.stop();
        assert!(log.contains("the bytes counted against quotas start at 0") && log.contains(why), "{log}");
    }
}

#[test]
fn mistakes_are_errors_and_change_nothing() {
    let quota = QuotaGroup::new(SETTINGS);
    let daemon = quota.serve().start();
    for (option, value, why) in [
        ("--quota", "2T", "is no amount in a period"),
        ("--quota", "2T per fortnight", "has no period \"fortnight\""),
        ("--write-quota", "0 per day", "is an amount of 0"),
        ("--quota-rate", "fast", "is not a size"),
    ] {
        let refused = run_misused(&quota.scratch, &["throttle", "g", option, value]);
        assert!(refused.contains(why), "{refused}");
    }
    for (option, value, why) in [
        ("--quota-rate", "0", "needs quota-rate"),
        ("--bps-reservation", "1M", "is below bps-reservation (1048576)"),
    ] {
        let refused = run_failing(&quota.scratch, &["throttle", "g", option, value]);
        assert!(refused.contains(why), "{refused}");
    }
    assert_eq!(quota.group()["quota"], "4M per month");
    run_ok(
        &quota.scratch,
        &["throttle", "a", "--write-quota", "1G per hour", "--quota-rate", "1M", "--save"],
    );
    let saved = fs::read_to_string(quota.scratch.path("weir.toml")).expect("a config");
    assert!(saved.contains("write-quota = \"1G per hour\""), "{saved}");
    run_ok(&quota.scratch, &["throttle", "a", "--write-quota", "0"]);
    assert_eq!(find(&status(&quota.scratch, "0"), "disks", "a")["quota-rate"], Value::Null);
    let refused = run_failing(&quota.scratch, &["throttle", "a", "--quota-rate", "5M"]);
    assert!(refused.contains("has no effect without a quota"), "{refused}");
    daemon.stop();
}

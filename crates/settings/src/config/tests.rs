//! Every rule of the config file with its message, and that the documentation speaks of every key.

use std::time::Duration;

use block::{disk::DetectZeroes, reactor::Polling, storage::CacheMode};
use policy::{
    access::{Access, Names},
    throttle::LimitKind,
};

use super::*;
use crate::{Credentials, Endpoint, Plan, Sandbox, Settings, Tls};

/// The file as all of these tests know it: `/etc/weir/weir.toml`, called by its base name.
fn plan_with(text: &str, inherited: usize) -> Result<Plan, String> {
    let draft = parse("weir.toml", text, Path::new("/etc/weir"));
    draft.and_then(|draft| Plan::new(draft, inherited)).map_err(|wrong| wrong.to_string())
}

fn plan(text: &str) -> Plan {
    plan_with(text, 0).unwrap()
}

#[track_caller]
fn check(text: &str, expect: &str) {
    assert_eq!(plan_with(text, 0).unwrap_err(), expect, "\n{text}");
}

/// A disk with more lines, the first of which is line 3.
fn disk_with(lines: &str) -> String {
    format!("[disk.vm1]\nimage = \"vm1.raw\"\n{lines}\n")
}

/// The daemon with more lines, the first of which is line 2.
fn daemon_with(lines: &str) -> String {
    format!("[daemon]\n{lines}\n[disk.vm1]\nimage = \"vm1.raw\"\n")
}

/// The last of these lines of a disk breaks this rule.
#[track_caller]
fn check_disk(lines: &str, rule: &str) {
    let (number, last) = (2 + lines.lines().count(), lines.lines().last().unwrap());
    check(&disk_with(lines), &format!("weir.toml:{number}: disk.vm1.{last}: {rule}"));
}

#[track_caller]
fn check_daemon(lines: &str, rule: &str) {
    let (number, last) = (1 + lines.lines().count(), lines.lines().last().unwrap());
    check(&daemon_with(lines), &format!("weir.toml:{number}: daemon.{last}: {rule}"));
}

#[test]
fn a_disk_with_everything() {
    let plan = plan(
        r#"
        [group.gold]
        iops-total = 6000
        iops-total-max = 12_000
        iops-total-max-length = "30"
        bps-total = "100M"
        weight = 300
        iops-reservation = 600
        bps-reservation = "2M"
        watermark = 90
        group = "host"

        [group.host]
        iops-total = 50000

        [disk.vm1]
        image = "vm1.raw"
        format = "raw"
        cache = "none"
        description = "the first"
        read-only = true
        force-share = true
        group = "gold"
        iops-read = 500
        weight = 200
        iops-reservation = 50
        bps-reservation = "1M"
        fault = ["kind=read,error=EIO", "kind=write,error=ENOSPC"]
        delay = "read=5ms"
        rate = "bytes=22M"
        export = [{ type = "nbd", listen = "unix:vm1.sock" }, { type = "nbd", listen = "[::1]:7", name = "", read-only = true }]
        "#,
    );
    let disk = &plan.disks[0];
    assert_eq!(disk.image.to_string(), "/etc/weir/vm1.raw", "paths are seen from the file's directory");
    assert_eq!((disk.cache, disk.read_only, disk.force_share), (CacheMode::None, true, true));
    assert_eq!((disk.name.as_str(), disk.description.as_str()), ("vm1", "the first"));
    assert_eq!(disk.faults.len(), 2);
    assert_eq!(disk.settings.limits.limit(LimitKind::IopsRead).rate, 500, "a member's limits are its own");
    let Settings { limits: _, weight, iops_reservation, bps_reservation, watermark } = disk.settings;
    assert_eq!((weight, iops_reservation, bps_reservation, watermark), (200, 50, 1 << 20, 0));
    let names: Vec<_> = plan.groups.iter().map(|group| (group.name.as_str(), group.parent)).collect();
    assert_eq!(names, [("host", None), ("gold", Some(0))], "a group comes after the one it lies in");
    assert_eq!(disk.group, Some(1));
    let Settings { limits, weight, iops_reservation, bps_reservation, watermark } = plan.groups[1].settings;
    assert_eq!((weight, iops_reservation, bps_reservation, watermark), (300, 600, 2 << 20, 90));
    let iops = limits.limit(LimitKind::IopsTotal);
    assert_eq!((iops.rate, iops.burst_rate, iops.burst_length_s), (6000, 12_000, 30));
    assert_eq!(limits.limit(LimitKind::BpsTotal).rate, 100 << 20);
    let at: Vec<_> =
        plan.servers.iter().map(|server| (&server.endpoint, server.exports[0].name.as_str())).collect();
    let address = |text: &str| Endpoint::Address(text.parse().unwrap());
    assert_eq!(at, [(&address("unix:/etc/weir/vm1.sock"), "vm1"), (&address("[::1]:7"), "")]);
    let read_only: Vec<_> = plan.servers.iter().map(|server| server.exports[0].read_only).collect();
    assert_eq!(read_only, [false, true]);
}

#[test]
fn a_disk_with_nothing_but_an_image() {
    let plan = plan("[disk.vm1]\nimage = \"memory:1G\"\n");
    assert_eq!(plan.disks[0].cache, CacheMode::Writeback);
    assert_eq!((plan.disks[0].settings, plan.disks[0].group), (Settings::default(), None));
    assert_eq!((plan.service.qmp, plan.service.state), (Vec::<PathBuf>::new(), None));
    assert_eq!(plan.servers[0].endpoint, Endpoint::Address(Address::standard()));
    assert_eq!(plan.service.max_connections, 100);
    assert_eq!(plan.service.poll, Polling::Off);
    assert_eq!(plan.service.log.filter, "info");
    assert!((1..=8).contains(&plan.service.workers));
}

#[test]
fn disks_keep_the_order_of_the_file() {
    let text: String =
        (0..1000).map(|n| format!("[disk.d{n}]\nimage = \"null:1G\"\niops-total = 100\n")).collect();
    assert_eq!(plan(&text).servers[0].exports.len(), 1000);
    let plan =
        plan("[disk.z]\nimage = \"null:1\"\n[disk.a]\nimage = \"null:1\"\n[disk.m]\nimage = \"null:1\"\n");
    let names: Vec<_> = plan.servers[0].exports.iter().map(|export| export.name.as_str()).collect();
    assert_eq!(names, ["z", "a", "m"]);
}

#[test]
fn the_daemon_with_everything() {
    let plan = plan(
        r#"
        [daemon]
        nbd = ["unix:weir.sock", "localhost:1"]
        workers = 3
        poll = "100us"
        max-connections = 0
        max-connections-per-address = 9
        allow = ["10.0.0.0/8", "::1"]
        deny = "10.1.0.0/16"
        tls-authz = "CN=*"
        tls = "required"
        tls-certificates = "pki"
        tls-verify-peer = true
        log = "debug"
        log-format = "json"
        pid-file = "/run/weir.pid"
        qmp = ["unix:qmp.sock", "unix:/run/weir/qmp.sock"]
        state = "state"
        [disk.vm1]
        image = "null:1G"
        "#,
    );
    let service = plan.service;
    assert_eq!((service.workers, service.max_connections), (3, 0));
    assert_eq!(service.max_connections_per_address, Some(9));
    let Access { networks, names } = service.access;
    assert_eq!(networks.allow.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.0/8", "::1/128"]);
    assert_eq!(networks.deny, ["10.1.0.0/16".parse().unwrap()]);
    assert_eq!(names, Some(Names::any_of(["CN=*".to_owned()])));
    assert_eq!(service.poll, Polling::UpTo(Duration::from_micros(100)));
    let directory = PathBuf::from("/etc/weir/pki");
    assert_eq!(service.tls, Tls::Required(Credentials::Certificates { directory, verify_peer: true }));
    assert_eq!(service.pid_file, Some(PathBuf::from("/run/weir.pid")));
    assert_eq!(service.qmp, [PathBuf::from("/etc/weir/qmp.sock"), PathBuf::from("/run/weir/qmp.sock")]);
    assert_eq!(service.state, Some(PathBuf::from("/etc/weir/state")));
    assert_eq!(plan.servers.len(), 2);
}

#[test]
fn what_is_no_toml_is_refused_with_its_line() {
    let refused = plan_with("[disk.vm1]\nimage = \n", 0).unwrap_err();
    assert!(refused.starts_with("weir.toml:2: not TOML: "), "{refused}");
    let twice = plan_with("[disk.vm1]\nimage = \"a\"\nimage = \"b\"\n", 0).unwrap_err();
    let already = "is there already, further up (take out one of the two)";
    assert_eq!(twice, format!("weir.toml:3: disk.vm1.image: {already}"));
    for (text, expect) in [
        ("a = 1\na = 2\n", "2: a"),
        ("[disk.vm1]\nimage = \"a\"\n[group.g]\n[disk.vm1]\nimage = \"b\"\n", "4: disk.vm1"),
        ("[disk.vm1]\nexport = { type = \"nbd\", type = \"nbd\" }\n", "2: disk.vm1.type"),
        ("[daemon]\n\"nbd\" = 1\nnbd = 2\n", "3: daemon.nbd"),
    ] {
        let said = plan_with(text, 0).unwrap_err();
        assert_eq!(said, format!("weir.toml:{expect}: {already}"));
    }
    let deep = "a = ".to_owned() + &"[".repeat(100_000);
    assert!(plan_with(&deep, 0).unwrap_err().starts_with("weir.toml:1: not TOML: "));
}

#[test]
fn names_must_be_there_and_their_own() {
    check(
        &disk_with("cahce = \"none\""),
        "weir.toml:3: disk.vm1.cahce: unknown key (did you mean \"cache\"?)",
    );
    check(
        &disk_with("iops_total = 5"),
        "weir.toml:3: disk.vm1.iops_total: unknown key (did you mean \"iops-total\"?)",
    );
    check("[disks.vm1]\nimage = \"a\"\n", "weir.toml:1: disks: unknown key (did you mean \"disk\"?)");
    check("[group.g]\niops = 5\n", "weir.toml:2: group.g.iops: unknown key (did you mean \"iops-total\"?)");
    check(
        &disk_with("export = [{ type = \"nbd\", listen = \"h:1\", zzz = 1 }]"),
        "weir.toml:3: disk.vm1.export[0].zzz: unknown key; here may be type, listen, name, read-only",
    );
    check(
        "[disk.vm1]\n",
        "weir.toml:1: disk.vm1: no image (add image = \"PATH\", \"memory:SIZE\", \"null:SIZE\", \"rbd:POOL/IMAGE\" \
         or \"nbd://HOST/EXPORT\")",
    );
    check("", "no disks: there is nothing to serve (add a [disk.NAME] with an image)");
    check(
        &disk_with("[disk.\"\"]\nimage = \"b\""),
        "weir.toml:3: disk.\"\": the name is empty (give it one)",
    );
    check(
        &disk_with("[disk.\"a\\nb\"]\nimage = \"b\""),
        "weir.toml:3: disk.\"a\\nb\": the name holds a control character (leave it out)",
    );
    check(
        &disk_with("[disk.\"..\"]\nimage = \"b\""),
        "weir.toml:3: disk.\"..\": the name is a directory's, which no path can hold (give another)",
    );
    check_disk("group = \"silver\"", "is no group of this file (add [group.silver])");
    check(
        &disk_with("group = \"glod\"\n[group.gold]"),
        "weir.toml:3: disk.vm1.group = \"glod\": is no group of this file (did you mean \"gold\"?)",
    );
    check(
        "[disk.gold]\nimage = \"a\"\n[group.gold]\n",
        "weir.toml:3: group.gold: a disk is called \"gold\" too, and commands take both (rename one)",
    );
}

#[test]
fn what_is_read_ahead() {
    use policy::prefetch::{Mode, Settings};
    let prefetch =
        |lines: &str| plan(&format!("[disk.vm1]\nimage = \"vm1.raw\"\n{lines}\n")).disks[0].prefetch;
    assert_eq!(prefetch(""), Settings::default());
    for (value, mode) in
        [("true", Mode::On), ("false", Mode::Off), ("\"on\"", Mode::On), ("\"auto\"", Mode::Auto)]
    {
        assert_eq!(prefetch(&format!("prefetch = {value}")).mode, mode, "{value}");
    }
    let all = "prefetch-memory = \"1G\"\nprefetch-largest-request = 4096\nprefetch-window-min = \"8K\"\n\
               prefetch-window-max = \"64M\"\nprefetch-streams = 9";
    let expect = Settings {
        mode: Mode::Auto,
        memory_bytes: 1 << 30,
        largest_request_bytes: 4096,
        window_min_bytes: 8 << 10,
        window_max_bytes: 64 << 20,
        streams: 9,
    };
    assert_eq!(prefetch(all), expect);
    check_disk("prefetch = 1", "is none of on, off and auto");
    check_disk("prefetch-window-max = \"1G\"", "is out of range; it may be from 4K to 64M");
    check_disk(
        "prefetch = false\nprefetch-window-max = \"64K\"",
        "prefetch-window-min (131072) is above prefetch-window-max (65536); the smallest window may not be larger than the largest",
    );
}

#[test]
fn on_and_off_may_be_true_and_false() {
    let plan = plan(
        "[daemon]\ntls = false\nsandbox = false\npoll = false\n[disk.vm1]\nimage = \"vm1.raw\"\ndetect-zeroes = true\n",
    );
    let service = &plan.service;
    assert_eq!((&service.tls, service.sandbox, service.poll), (&Tls::Off, Sandbox::Off, Polling::Off));
    assert_eq!(plan.disks[0].detect_zeroes, DetectZeroes::On);
    check_disk("discard = false", "is neither unmap nor ignore");
}

#[test]
fn caches_and_secrets_of_qcow2() {
    let text = "[daemon]\nimage-root = \"images\"\n[disk.vm1]\nimage = \"vm1.qcow2\"\nl2-cache-size = \"2M\"\n\
                cache-size = 4194304\nsecret-file = [\"a\", \"/b\"]\n";
    let plan = plan(text);
    let qcow2 = &plan.disks[0].qcow2;
    assert_eq!(qcow2.caches.l2, Some(block::image::qcow2::L2Size::Bytes(2 << 20)));
    assert_eq!(qcow2.caches.total_bytes, Some(4 << 20));
    let files: Vec<_> = qcow2.secrets.iter().map(ToString::to_string).collect();
    assert_eq!(files, ["/etc/weir/a", "/b"]);
    assert_eq!(plan.service.image_root.unwrap().to_str(), Some("/etc/weir/images"));
    check_disk(
        "l2-cache-size = 1\nrefcount-cache-size = 1\ncache-size = 1",
        "cache-size, l2-cache-size and refcount-cache-size may not be set together (leave one out)",
    );
}

#[test]
fn values_are_refused_with_their_rule() {
    check_disk("cache = \"fast\"", "is not a cache mode (writeback, writethrough, none, directsync, unsafe)");
    check_disk("format = \"vmdk\"", "is not a format that weir serves (raw, qcow2)");
    check_disk("read-only = 1", "is not a flag; write true or false");
    check_disk("cache = true", "is a boolean; a string or a number is needed");
    check_disk("cache = []", "is an array; a string or a number is needed (write one, without brackets)");
    check_disk(
        "iops-total = 1.5",
        "is not a plain number; a count takes no suffix and no fraction (write 1)",
    );
    check_disk("iops-total = -5", "is not a whole number of 0 or more");
    check_disk("iops-total = inf", "is not a whole number of 0 or more");
    check_disk(
        "bps-read = \"10 MB\"",
        "is not a size (a number of bytes, perhaps with K, M, G, T, P or E for powers of 1024: 512, 64K, 1.5G; KB is 1000, and so on)",
    );
    check_disk("export = []", "is empty (leave the key out, or give a value)");
    check_disk("export = \"nbd\"", "is not a table; write its settings as KEY = VALUE lines below it");
    check_daemon(
        "record = \"day\"",
        "is not a table; write record = { directory = \"day\" }, with keep and limit if they are to be others",
    );
    check_daemon(
        "nbd = \"localhost\"",
        "has no port (write localhost:PORT, such as localhost:10809, or unix:PATH)",
    );
    check_daemon("workers = 0", "is out of range; it is from 1 to 256");
    check_daemon("poll = \"2s\"", "is too long; it is 1s at most (0 never polls)");
    check_daemon("log-format = \"xml\"", "is not a log format; there are text and json");
    check(
        "disk = 5\n",
        "weir.toml:1: disk = 5: is not a table; write its settings as KEY = VALUE lines below it",
    );
    check(
        "[disk.vm1]\nimage = \"a\"\niops-total = 1000\niops-total-max = 500\n",
        "weir.toml:4: disk.vm1.iops-total-max = 500: \
         is below iops-total (1000); a burst rate must be at least the rate",
    );
    check(
        "[group.gold]\nbps-read = \"1M\"\nbps-total = \"2M\"\n[disk.vm1]\nimage = \"a\"\n",
        "weir.toml:3: group.gold.bps-total = \"2M\": \
         cannot be set together with bps-read (1048576); use either the total or read and write",
    );
    check_disk("iops-size = 4096", "has no limit to apply to; it needs iops-total, iops-read or iops-write");
    check_disk("bps-total = \"1024T\"", "is too large; it may be 1000000000000000 at most");
    check_disk("iops-total-max-length = 0", "is too short; a burst length must be at least 1 second");
    check(
        &disk_with("group = \"gold\"\nwatermark = 50\n[group.gold]\niops-total = 6"),
        "weir.toml:4: disk.vm1.watermark = 50: the disk is in group \"gold\", which has the watermark for its members (set it at [group.gold])",
    );
    for value in ["0", "10001", "99999999999"] {
        check_disk(&format!("weight = {value}"), "is out of range; a weight is from 1 to 10000");
    }
    check(
        "[group.g]\nwatermark = 101\n[disk.vm1]\nimage = \"a\"\n",
        "weir.toml:2: group.g.watermark = 101: is out of range; a watermark is from 0 to 100 percent",
    );
    for key in ["iops-reservation", "bps-reservation"] {
        check_disk(&format!("{key} = 1000000000000001"), "is too large; it may be 1000000000000000 at most");
    }
    check_disk(
        "iops-reservation = \"1K\"",
        "is not a plain number; a count takes no suffix and no fraction (write 1000)",
    );
    check_disk(
        "force-share = true",
        "needs read-only; sharing an image that others write is for reading alone",
    );
    let text = format!("[disk.vm1]\nimage = \"a\"\ncache = \"{}\"\n", "é".repeat(100_000));
    let refused = plan_with(&text, 0).unwrap_err();
    assert!(refused.contains("ééé…: is not a cache mode"), "{refused}");
    assert!(refused.len() < 300);
}

/// All that is wrong with a file.
#[track_caller]
fn check_all(text: &str, expect: &[&str]) {
    let mistakes = Mistakes::default();
    let draft = parse_telling("f", text, Path::new("/etc/weir"), &mistakes);
    let all = Plan::judged(draft, 0, mistakes).map(drop).err().unwrap_or_default();
    let all: Vec<_> = all.iter().map(ToString::to_string).collect();
    let is_so = |(said, expect): (&String, &&str)| said.starts_with(expect);
    assert!(all.len() == expect.len() && all.iter().zip(expect).all(is_so), "{all:#?}\n{text}");
}

#[test]
fn all_that_is_wrong_is_told_in_the_order_of_the_file() {
    // What one table gets wrong by itself. Where something in it cannot be read, only values are
    // judged that say all by themselves.
    check_all(
        r#"[disk.a]
image = "a.raw"
cahce = "none"
weight = "heavy"
group = "gold"
[disk.b]
image = "b.raw"
weight = 0
iops-total = 1000000000000001
group = "glod"
export = [{ type = "nbd", listen = "x" }, { type = "fuse", fiel = "f" }, { tipe = "nbd", zzz = 1 }]
[daemon]
workers = 0
poll = "2s"
memory = "1M"
user = ":disk"
zzz = 1
tls = "on"
[disk.c]
[group.gold]
iops-totl = 100
[group.tin]
watermark = 101
iops-reservation = 1000000000000001
group = "tinn"
[zzz]
"#,
        &[
            "f:3: disk.a.cahce: unknown key",
            "f:4: disk.a.weight = \"heavy\": is not a whole number",
            "f:8: disk.b.weight = 0: is out of range",
            "f:9: disk.b.iops-total = 1000000000000001: is too large",
            "f:11: disk.b.export[0].listen = \"x\": has no port (write x:PORT",
            "f:11: disk.b.export[1].fiel: unknown key",
            "f:11: disk.b.export[2].tipe: unknown key",
            "f:13: daemon.workers = 0: is out of range",
            "f:14: daemon.poll = \"2s\": is too long",
            "f:15: daemon.memory = \"1M\": is too little",
            "f:16: daemon.user = \":disk\": names no user",
            "f:17: daemon.zzz: unknown key",
            "f:19: disk.c: no image",
            "f:21: group.gold.iops-totl: unknown key",
            "f:23: group.tin.watermark = 101: is out of range",
            "f:24: group.tin.iops-reservation = 1000000000000001: is too large",
            "f:25: group.tin.group = \"tinn\": is no group of this file (did you mean \"tin\"?)",
            "f:26: zzz: unknown key",
        ],
    );
    // A group that is wrong is there, and its members say nothing of it.
    check_all(
        "[group.gold]\niops-totl = 1\n[disk.a]\nimage = \"a\"\ngroup = \"gold\"\n\
         [disk.b]\nimage = \"b\"\ngroup = \"tin\"\n",
        &["f:2: group.gold.iops-totl", "f:8: disk.b.group = \"tin\": is no group of this file"],
    );
    // Rules that tie tables, where all of them can be read.
    let device = "export = { type = \"vhost-user-blk\", listen = \"unix:s\" }";
    check_all(
        &format!(
            "[disk.a]\nimage = \"x\"\n{device}\n[disk.b]\nimage = \"x\"\nweight = 0\n{device}\n\
             allow = \"::1\"\n[daemon]\nmetrics = \"unix:s\"\nworkers = 0\n"
        ),
        &[
            "f:5: disk.b.image = \"x\": another disk has this image",
            "f:6: disk.b.weight = 0: is out of range",
            "f:7: disk.b.export.listen = \"unix:s\": a disk is exported there already",
            "f:11: daemon.workers = 0: is out of range",
        ],
    );
    check_all(
        "[daemon]\nmetrics = \"unix:s\"\nqmp = \"unix:s\"\nallow = \"::1\"\n[disk.a]\nimage = \"x\"\n\
         export = { type = \"nbd\", listen = \"unix:s\" }\n",
        &[
            "f:2: daemon.metrics = \"unix:s\": disks are exported at this socket",
            "f:3: daemon.qmp = \"unix:s\": disks are exported at this socket",
            "f:4: daemon.allow = \"::1\": is not used",
        ],
    );
    // What follows from a mistake is none of its own.
    check_all(
        "[daemon]\nnbd = \"h\"\ntls = \"on\"\n[disk.a]\nimage = \"a\"\nallow = \"::1\"\ntls-authz = \"a\"\n\
         [disk.b]\nimage = \"b\"\niops-total = \"x\"\niops-total-max = 5\n",
        &["f:2: daemon.nbd = \"h\"", "f:10: disk.b.iops-total = \"x\""],
    );
    check_all("[disk.a]\nimage = 5.5.5\n", &["f:2: not TOML"]);
}

#[test]
fn no_file_has_mistakes_without_end() {
    let disk = |n: usize| format!("[disk.d{n}]\nimage = \"null:1\"\ngroup = \"g\"\n");
    let text: String = (0..1000).map(disk).collect();
    let mistakes = Mistakes::default();
    let draft = parse_telling("f", &text, Path::new(""), &mistakes);
    assert_eq!(Plan::judged(draft, 0, mistakes).unwrap_err().len(), 100);
    let text: String = (0..1000).map(|n| format!("k{n} = 1\n")).collect();
    let mistakes = Mistakes::default();
    parse_telling("f", &text, Path::new(""), &mistakes);
    assert!(mistakes.is_full());
}

#[test]
fn groups_lie_in_groups_but_never_in_themselves() {
    let disk = "[disk.vm1]\nimage = \"a\"\n";
    let chain = |count: usize| -> String {
        let group = |n: usize| match n {
            0 => "[group.g0]\n".to_owned(),
            n => format!("[group.g{n}]\ngroup = \"g{}\"\n", n - 1),
        };
        (0..count).rev().map(group).collect()
    };
    let deep = plan(&format!("{disk}{}", chain(8)));
    let parents: Vec<_> = deep.groups.iter().map(|group| group.parent).collect();
    assert_eq!(parents, [None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(5), Some(6)]);
    check(
        &format!("{disk}{}", chain(9)),
        "weir.toml:4: group.g8.group = \"g7\": \
         makes 9 groups that lie in each other; there may be 8 (leave some out)",
    );
    check(
        &format!("{disk}[group.a]\ngroup = \"a\"\n"),
        "weir.toml:4: group.a.group = \"a\": is the group itself (name another, or leave it out)",
    );
    check(
        &format!("{disk}[group.z]\ngroup = \"a\"\n[group.a]\ngroup = \"b\"\n[group.b]\ngroup = \"a\"\n"),
        "weir.toml:6: group.a.group = \"b\": makes the group lie in itself, by way of b (break the circle)",
    );
    check(
        &format!("{disk}[group.a]\ngroup = \"c\"\n"),
        "weir.toml:4: group.a.group = \"c\": is no group of this file (add [group.c])",
    );
    let count = 100_000;
    let group = |n: usize| format!("[group.g{n}]\ngroup = \"g{}\"\n", (n + 1) % count);
    let text: String = (0..count).map(group).collect();
    let refused = plan_with(&format!("[disk.d]\nimage = \"a\"\n{text}"), 0).unwrap_err();
    let expect = "weir.toml:4: group.g0.group = \"g1\": \
                  makes the group lie in itself, by way of g1, g2, g3, g4 and 99995 more (break the circle)";
    assert_eq!(refused, expect);
}

#[test]
fn what_listens_says_what_and_where() {
    check_daemon("qmp = \"localhost:4444\"", "is not a Unix socket; write unix:PATH");
    check_daemon("qmp = \"unix:\"", "has no path; write unix:PATH");
    check(
        &daemon_with("qmp = [\"unix:a\", \"unix:/etc/weir/a\"]"),
        "weir.toml:2: daemon.qmp[1] = \"unix:/etc/weir/a\": is given twice (remove one)",
    );
    check(
        &daemon_with("qmp = \"unix:a\"\nnbd = \"unix:a\""),
        "weir.toml:2: daemon.qmp = \"unix:a\": disks are exported at this socket (use another)",
    );
    for line in ["nbd", "qmp", "metrics", "http"] {
        let both = format!("{line} = \"unix:/etc/weir/./a\"\npid-file = \"a\"");
        check_daemon(&both, "a socket is to be there (choose another file)");
    }
    check_daemon("metrics = \"unix:\"", "has no path; write unix:PATH");
    check(
        &daemon_with("metrics = \"unix:a\"\nnbd = \"unix:a\""),
        "weir.toml:2: daemon.metrics = \"unix:a\": disks are exported at this socket (use another)",
    );
    check(
        &daemon_with("metrics = \"unix:a\"\nqmp = \"unix:a\""),
        "weir.toml:2: daemon.metrics = \"unix:a\": is a control socket (use another)",
    );
    check_daemon("tls = \"on\"", "has no credentials (set tls-certificates or tls-psk)");
    for line in ["tls-psk = \"k\"", "tls-certificates = \"k\"", "tls-verify-peer = true"] {
        check_daemon(line, "is not used, because tls is off (set tls to on or required)");
    }
    check(
        &daemon_with("tls = \"on\"\ntls-psk = \"k\"\ntls-certificates = \"d\""),
        "weir.toml:3: daemon.tls-psk = \"k\": tls-certificates is given too (choose certificates or keys)",
    );
    check_daemon(
        "tls = \"on\"\ntls-psk = \"k\"\ntls-verify-peer = true",
        "has no meaning with tls-psk (whoever has a key is verified)",
    );
    let own = "[disk.a]\nimage = \"null:1\"\nexport = { type = \"nbd\", listen = \"h:1\" }\n";
    check(
        &format!("[daemon]\nnbd = \"h:2\"\n{own}"),
        "weir.toml:2: daemon.nbd = \"h:2\": is not used, because every disk says where it is exported (remove it)",
    );
    // A disk may come from another host of a cluster, and the last one may leave.
    for disks in ["", own] {
        let cluster = format!("[cluster]\nname = \"lab\"\netcd = \"http://e:2379\"\n{disks}");
        let endpoints =
            |plan: Plan| plan.servers.into_iter().map(|server| server.endpoint).collect::<Vec<_>>();
        let at = |address: &str| Endpoint::Address(address.parse().unwrap());
        let own: Vec<_> = (!disks.is_empty()).then(|| at("h:1")).into_iter().collect();
        let said = plan_with(&format!("[daemon]\nnbd = \"h:2\"\n{cluster}"), 0).unwrap();
        assert_eq!(endpoints(said), [vec![at("h:2")], own.clone()].concat());
        let passed = plan_with(&cluster, 2).unwrap();
        assert_eq!(endpoints(passed), [vec![Endpoint::Inherited], own.clone()].concat());
        assert_eq!(endpoints(plan_with(&cluster, 0).unwrap()), own);
    }
    assert_eq!(
        plan_with(own, 2).unwrap_err(),
        "LISTEN_FDS: what was passed (sockets: 2) is not used, because every disk says where it is exported \
         (pass only those that `fd:NAME` of an export takes, as `--vhost-user-blk fd:NAME` and `--nbd fd:NAME` do)"
    );
    check(
        &daemon_with("nbd = [\"h:2\", \"h:2\"]"),
        "weir.toml:2: daemon.nbd[1] = \"h:2\": is given twice (remove one)",
    );
    let disk = "[disk.a]\nimage = \"null:1\"\n";
    assert_eq!(plan_with(disk, 1).unwrap().servers[0].endpoint, Endpoint::Inherited);
    // A place that only exports have named is for no other disk, even where one would be by itself.
    let at_standard = own.replace("h:1", "localhost:10809");
    let silent = disk.replace("disk.a", "disk.b");
    for (text, inherited, expect) in [
        (own.to_owned(), 0, vec![None]),
        (at_standard.clone(), 0, vec![None]),
        (disk.to_owned(), 0, vec![Some(false)]),
        (disk.to_owned(), 1, vec![Some(false)]),
        (format!("{at_standard}{silent}"), 0, vec![Some(false)]),
        (format!("[daemon]\nnbd = \"h:2\"\n{own}{silent}"), 0, vec![None, Some(false)]),
        (
            format!("[daemon]\nnbd = \"h:2\"\n[cluster]\nname = \"lab\"\netcd = \"http://e:2379\"\n{own}"),
            0,
            vec![Some(false), None],
        ),
    ] {
        let plan = plan_with(&text, inherited).unwrap();
        assert_eq!(plan.servers.iter().map(|server| server.standard).collect::<Vec<_>>(), expect, "{text}");
    }
    assert_eq!(
        plan_with(&format!("[daemon]\nnbd = \"h:2\"\n{disk}"), 1).unwrap_err(),
        "weir.toml:2: daemon.nbd = \"h:2\": the service manager passed sockets too, in LISTEN_FDS (use one or the other)"
    );
    let export = |settings: &str| format!("export = [{{ {settings} }}]");
    let check = |settings: &str, expect: &str| check(&disk_with(&export(settings)), expect);
    check(
        "listen = \"h:1\"",
        "weir.toml:3: disk.vm1.export[0]: no type \
         (add type = \"nbd\", \"vhost-user-blk\", \"ublk\", \"fuse\" or \"nbd-device\")",
    );
    check(
        "type = \"nbd\"",
        "weir.toml:3: disk.vm1.export[0]: no address (add listen = \"unix:PATH\" or \"HOST:PORT\")",
    );
    for (settings, wrong, right) in [
        ("type = \"nbd\", lisen = \"h:1\"", "lisen", "listen"),
        ("tpye = \"nbd\", listen = \"h:1\"", "tpye", "type"),
        ("type = \"vhost-user-blk\", queues = 2, listn = \"unix:a\"", "listn", "listen"),
        ("type = \"fuse\", growable = true, fiel = \"a\"", "fiel", "file"),
    ] {
        check(
            settings,
            &format!("weir.toml:3: disk.vm1.export[0].{wrong}: unknown key (did you mean {right:?}?)"),
        );
    }
    check(
        "type = \"iscsi\"",
        "weir.toml:3: disk.vm1.export[0].type = \"iscsi\": \
         is not a type of export that weir has; there are \
         \"nbd\", \"vhost-user-blk\", \"ublk\", \"fuse\" and \"nbd-device\"",
    );
}

#[test]
fn what_has_no_effect_is_remarked() {
    let remarks = |text: &str| -> Vec<String> {
        let plan = plan(text);
        plan.remarks().into_iter().map(|remark| format!("{}: {}", remark.name, remark.remark)).collect()
    };
    let weighty = "[disk.a]\nimage = \"a\"\nweight = 200\nwatermark = 90\n";
    assert_eq!(
        remarks(weighty),
        [
            "a: the weight has no effect, because there is no group to share in (set group)",
            "a: the watermark has no effect, because there are no limits to lift (set some)",
        ]
    );
    let groups = "[group.x]\n[group.y]\nwatermark = 5\niops-reservation = 5\n[group.z]\ngroup = \"y\"\n";
    let member = "[disk.a]\nimage = \"a\"\ngroup = \"z\"\nweight = 200\niops-reservation = 5\n";
    assert_eq!(
        remarks(&format!("{groups}{member}")),
        [
            "x: no disk is in this group",
            "y: the reservation has no effect, because there is no group to have it from (set group)",
            "y: the watermark has no effect, because there are no limits to lift (set some)",
        ]
    );
    let machine = |name: &str, more: &str| {
        format!(
            "[disk.{name}]\nimage = \"{name}\"\nexport = {{ type = \"vhost-user-blk\", listen = \"unix:{name}\" {more} }}\n"
        )
    };
    let (one, two) = ("customer-database-disk-A", "customer-database-disk-B");
    assert_eq!(
        remarks(&(machine(one, "") + &machine(two, ""))),
        [format!(
            "{two}: another disk has the same serial number, of which a guest sees 20 bytes (set serial)"
        )]
    );
    assert!(remarks(&(machine(one, "") + &machine(two, ", serial = \"B\""))).is_empty());
}

#[test]
fn an_image_has_one_writer() {
    let two = |first: &str, second: &str| {
        format!("[disk.a]\nimage = \"x.raw\"\n{first}\n[disk.b]\nimage = \"/etc/weir/x.raw\"\n{second}\n")
    };
    let rule = "weir.toml:5: disk.b.image = \"/etc/weir/x.raw\": \
                another disk has this image (export one disk twice, or make both read-only)";
    check(&two("", ""), rule);
    check(&two("read-only = true", ""), rule);
    check(&two("", "read-only = true"), rule);
    assert_eq!(plan(&two("read-only = true", "read-only = true")).disks.len(), 2);
}

#[test]
fn disks_on_one_imitated_device_agree_on_its_rates() {
    let two = |first: &str, second: &str| {
        let disk = |name, rate| format!("[disk.{name}]\nimage = \"null:1\"\nrate = \"{rate}\"\n");
        disk("a", first) + &disk("b", second)
    };
    check(
        &two("bytes=1M,shared=x", "bytes=2M,shared=x"),
        "weir.toml:6: disk.b.rate = \"bytes=2M,shared=x\": \
         another disk shares \"x\" with other rates (give both the same, or another name)",
    );
    for second in ["shared=x,bytes=1M", "bytes=2M,shared=y", "bytes=2M"] {
        assert_eq!(plan(&two("bytes=1M,shared=x", second)).disks.len(), 2);
    }
}

#[test]
fn export_names_are_unique_at_an_address() {
    let export = |name: &str| format!("export = {{ type = \"nbd\", listen = \"h:1\", name = \"{name}\" }}");
    let two = |second: &str| {
        format!(
            "[disk.a]\nimage = \"null:1\"\n{}\n[disk.b]\nimage = \"null:1\"\n{}\n",
            export("x"),
            export(second)
        )
    };
    check(
        &two("x"),
        "weir.toml:6: disk.b.export.name = \"x\": \
         another export has the name \"x\" at this address (give it another name)",
    );
    assert_eq!(plan(&two("y")).servers[0].exports.len(), 2);
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let error = load(Path::new("/nonexistent/weir.toml")).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/weir.toml: cannot be read: No such file"), "{error}");
}

fn documentation() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/config.md");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_documentation_has_every_key_and_no_other() {
    let mistakes = Mistakes::default();
    let source = Source::new("", "", &mistakes);
    let table = DeTable::new();
    let reader = Reader { directory: Path::new("") };
    let text = documentation();
    let documented = |heading: &str| -> Vec<String> {
        let section = text.split("\n## ").find(|section| section.starts_with(heading)).expect(heading);
        let key = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
        let mut keys: Vec<_> = section.lines().filter_map(key).collect();
        keys.sort();
        keys
    };
    let known = |read: &dyn Fn(&Section<'_>), without: &[String]| -> Vec<String> {
        let section = Section::root(&source, &table);
        read(&section);
        let mut keys: Vec<_> = section.asked().into_iter().map(str::to_owned).collect();
        keys.retain(|key| !without.contains(key));
        keys.sort();
        keys
    };
    let nobody = || Said::new(String::new(), Place::new(""));
    let limits = known(&|section| drop(limits(section)), &[]);
    let settings = known(&|section| drop(settings(section)), &[]);
    let shares: Vec<_> = settings.iter().filter(|key| !limits.contains(key)).cloned().collect();
    let daemon = known(&|section| drop(reader.daemon(section)), &[]);
    let disk = known(&|section| drop(reader.disk(nobody(), section)), &settings);
    let group = known(&|section| drop(group(nobody(), section)), &settings);
    assert_eq!(documented("`[daemon]`"), daemon);
    assert_eq!(documented("`[disk.NAME]`"), disk);
    assert_eq!(documented("`[group.NAME]`"), group);
    assert_eq!(documented("Limits"), limits);
    assert_eq!(documented("Shares"), shares);
}

#[test]
fn the_documentation_s_examples_are_plans() {
    let text = documentation();
    let examples: Vec<_> =
        text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(examples.len() >= 2, "there are examples");
    for example in examples {
        plan(example);
    }
}

#[test]
fn who_may_connect_is_judged_with_where_and_how_it_is_asked() {
    let tls = "tls = \"required\"\ntls-psk = \"keys\"\n";
    let disk = |keys: &str| format!("[disk.vm1]\nimage = \"null:1G\"\n{keys}");
    let daemon = |keys: &str| format!("[daemon]\n{keys}\n{}", disk(""));
    let unix = "nbd = \"unix:s\"\n";
    let nobody = "nobody can come over the network";
    for (text, expect) in [
        (daemon("allow = \"10.1.0.0/8\""), "daemon.allow = \"10.1.0.0/8\": has bits behind its prefix"),
        (
            daemon("deny = [\"::1\", \"::1/128\"]"),
            "daemon.deny[1] = \"::1/128\": this network is given twice",
        ),
        (daemon(&format!("{unix}allow = \"::1\"")), nobody),
        (daemon(&format!("{unix}max-connections-per-address = 1")), nobody),
        (disk("allow = \"::1\"\nexport = { type = \"nbd\", listen = \"unix:s\" }"), nobody),
        (disk("deny = \"::1\"\nexport = { type = \"vhost-user-blk\", listen = \"unix:s\" }"), nobody),
        (
            disk("tls-authz = \"a\"\nexport = { type = \"vhost-user-blk\", listen = \"unix:s\" }"),
            "is not used, because the disk is not exported over NBD",
        ),
        (daemon("tls-authz = \"a\""), "is not used, because tls is off"),
        (daemon("tls-authz = \"\""), "is empty"),
        (disk("tls-authz = \"a\""), "is not used, because tls is off"),
        (daemon("tls = \"on\"\ntls-psk = \"keys\"\ntls-authz = \"a\""), "needs tls = required"),
        (daemon("tls = \"required\"\ntls-certificates = \"p\"\ntls-authz = \"a\""), "needs tls-verify-peer"),
    ] {
        let said = plan_with(&text, 0).unwrap_err();
        assert!(said.contains(expect), "{text}: {said}");
    }
    let plan = plan(&format!("[daemon]\n{tls}{}", disk("deny = \"::1\"\ntls-authz = [\"a\", \"b*\"]")));
    assert!(plan.service.access.is_open() && !plan.disks[0].access.is_open());
}

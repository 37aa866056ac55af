//! Valid config files.

mod documentation;
mod mistakes;

use std::{path::PathBuf, time::Duration};

use block::disk::DetectZeroes;
use policy::{
    access::{AccessRules, NameRules},
    throttle::LimitKind,
};
use reactor::PollingMode;
use storage::CacheMode;

use super::*;
use crate::{
    DesiredState, ListenAddress, ListenEndpoint, SandboxMode, ThrottleConfig, TlsConfig, TlsCredentialFiles,
};

/// Desired state for the text of `/etc/weir/weir.toml`; messages have the base name.
fn plan_with(text: &str, inherited: usize) -> Result<DesiredState, String> {
    let parsed = parse("weir.toml", text, Path::new("/etc/weir"));
    parsed.and_then(|parsed| DesiredState::new(parsed, inherited)).map_err(|error| error.to_string())
}

fn plan(text: &str) -> DesiredState {
    plan_with(text, 0).unwrap()
}

#[track_caller]
fn check(text: &str, expect: &str) {
    assert_eq!(plan_with(text, 0).unwrap_err(), expect, "\n{text}");
}

/// A disk with additional lines, beginning at line 3.
fn disk_with(lines: &str) -> String {
    format!("[disk.vm1]\nimage = \"vm1.raw\"\n{lines}\n")
}

/// The daemon with additional lines, beginning at line 2.
fn daemon_with(lines: &str) -> String {
    format!("[daemon]\n{lines}\n[disk.vm1]\nimage = \"vm1.raw\"\n")
}

/// Asserts that the last of these lines of a disk breaks this rule.
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
fn a_disk_with_every_key() {
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
    let ThrottleConfig {
        limits: _,
        weight,
        iops_reservation,
        bps_reservation,
        watermark,
        latency: _,
        quota: _,
    } = disk.settings;
    assert_eq!((weight, iops_reservation, bps_reservation, watermark), (200, 50, 1 << 20, 0));
    let names: Vec<_> =
        plan.groups.iter().map(|group| (group.name.as_str(), group.group.as_deref())).collect();
    assert_eq!(names, [("host", None), ("gold", Some("host"))], "a group comes after the one it lies in");
    assert_eq!(disk.group.as_deref(), Some("gold"));
    let ThrottleConfig { limits, weight, iops_reservation, bps_reservation, watermark, latency: _, quota: _ } =
        plan.groups[1].settings;
    assert_eq!((weight, iops_reservation, bps_reservation, watermark), (300, 600, 2 << 20, 90));
    let iops = limits.limit(LimitKind::IopsTotal);
    assert_eq!((iops.rate, iops.burst_rate, iops.burst_length_s), (6000, 12_000, 30));
    assert_eq!(limits.limit(LimitKind::BpsTotal).rate, 100 << 20);
    let at: Vec<_> =
        plan.servers.iter().map(|server| (&server.endpoint, server.exports[0].name.as_str())).collect();
    let address = |text: &str| ListenEndpoint::Address(text.parse().unwrap());
    assert_eq!(at, [(&address("unix:/etc/weir/vm1.sock"), "vm1"), (&address("[::1]:7"), "")]);
    // Each export has its own rights.
    let read_only: Vec<_> = plan.servers.iter().map(|server| server.exports[0].read_only).collect();
    assert_eq!(read_only, [false, true]);
}

#[test]
fn a_disk_with_only_an_image_has_defaults() {
    let plan = plan("[disk.vm1]\nimage = \"memory:1G\"\n");
    assert_eq!(plan.disks[0].cache, CacheMode::Writeback);
    assert_eq!((plan.disks[0].settings, &plan.disks[0].group), (ThrottleConfig::default(), &None));
    assert_eq!((&plan.process.qmp, &plan.process.state), (&Vec::<PathBuf>::new(), &None));
    assert_eq!(plan.servers[0].endpoint, ListenEndpoint::Address(ListenAddress::nbd_default()));
    assert_eq!(plan.process.max_connections, 100);
    assert_eq!(plan.process.poll, PollingMode::Off);
    assert_eq!(plan.process.log.filter, "info");
    assert!((1..=8).contains(&plan.process.workers));
}

#[test]
fn disks_keep_the_order_of_the_file() {
    let text: String =
        (0..1000).map(|n| format!("[disk.d{n}]\nimage = \"null:1G\"\niops-total = 100\n")).collect();
    assert_eq!(plan(&text).servers[0].exports.len(), 1000);
    let plan =
        plan("[disk.z]\nimage = \"null:1\"\n[disk.a]\nimage = \"null:1\"\n[disk.m]\nimage = \"null:1\"\n");
    // Names that sort differently than they are listed.
    let names: Vec<_> = plan.servers[0].exports.iter().map(|export| export.name.as_str()).collect();
    assert_eq!(names, ["z", "a", "m"]);
}

#[test]
fn the_daemon_with_every_key() {
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
    let service = plan.process;
    assert_eq!((service.workers, service.max_connections), (3, 0));
    assert_eq!(service.max_connections_per_address, Some(9));
    let AccessRules { networks, names } = service.access.clone();
    assert_eq!(networks.allow.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.0/8", "::1/128"]);
    assert_eq!(networks.deny, ["10.1.0.0/16".parse().unwrap()]);
    assert_eq!(names, Some(NameRules::any_of(["CN=*".to_owned()])));
    assert_eq!(service.poll, PollingMode::UpTo(Duration::from_micros(100)));
    let directory = PathBuf::from("/etc/weir/pki");
    assert_eq!(
        service.tls,
        TlsConfig::Required(TlsCredentialFiles::Certificates { directory, verify_peer: true })
    );
    assert_eq!(service.pid_file, Some(PathBuf::from("/run/weir.pid")));
    assert_eq!(service.qmp, [PathBuf::from("/etc/weir/qmp.sock"), PathBuf::from("/run/weir/qmp.sock")]);
    assert_eq!(service.state, Some(PathBuf::from("/etc/weir/state")));
    assert_eq!(plan.servers.len(), 2);
}

#[test]
fn prefetch_keys_are_read() {
    use policy::prefetch::{PrefetchConfig, PrefetchMode};
    let prefetch =
        |lines: &str| plan(&format!("[disk.vm1]\nimage = \"vm1.raw\"\n{lines}\n")).disks[0].prefetch;
    assert_eq!(prefetch(""), PrefetchConfig::default());
    for (value, mode) in [
        ("true", PrefetchMode::On),
        ("false", PrefetchMode::Off),
        ("\"on\"", PrefetchMode::On),
        ("\"auto\"", PrefetchMode::Auto),
    ] {
        assert_eq!(prefetch(&format!("prefetch = {value}")).mode, mode, "{value}");
    }
    let all = "prefetch-memory = \"1G\"\nprefetch-largest-request = 4096\nprefetch-window-min = \"8K\"\n\
               prefetch-window-max = \"64M\"\nprefetch-streams = 9";
    let expect = PrefetchConfig {
        mode: PrefetchMode::Auto,
        memory_bytes: 1 << 30,
        largest_request_bytes: 4096,
        window_min_bytes: 8 << 10,
        window_max_bytes: 64 << 20,
        streams: 9,
    };
    assert_eq!(prefetch(all), expect);
    check_disk("prefetch = 1", "is not one of on, off and auto");
    check_disk("prefetch-window-max = \"1G\"", "is out of range; it may be from 4K to 64M");
    check_disk("prefetch-memory = \"4K\"", "is out of range; it may be from 256K to 1T");
    check_disk("prefetch-streams = 0", "is out of range; it may be from 1 to 4096");
    check_disk(
        "prefetch = false\nprefetch-window-max = \"64K\"",
        "prefetch-window-min (131072) is above prefetch-window-max (65536); the smallest window \
         may not be larger than the largest",
    );
}

#[test]
fn on_and_off_may_be_true_and_false() {
    let plan = plan(
        "[daemon]\n\
         tls = false\n\
         sandbox = false\n\
         poll = false\n\
         [disk.vm1]\n\
         image = \"vm1.raw\"\n\
         detect-zeroes = true\n",
    );
    let service = &plan.process;
    assert_eq!(
        (&service.tls, service.sandbox, service.poll),
        (&TlsConfig::Off, SandboxMode::Off, PollingMode::Off)
    );
    assert_eq!(plan.disks[0].detect_zeroes, DetectZeroes::On);
    // `discard` has no off: true and false are no synonyms there.
    check_disk("discard = false", "is neither unmap nor ignore");
}

#[test]
fn caches_and_secrets_of_qcow2() {
    let text = "[daemon]\n\
                image-root = \"images\"\n\
                [disk.vm1]\n\
                image = \"vm1.qcow2\"\n\
                l2-cache-size = \"2M\"\n\
                cache-size = 4194304\n\
                secret-file = [\"a\", \"/b\"]\n";
    let plan = plan(text);
    let qcow2 = &plan.disks[0].qcow2;
    assert_eq!(qcow2.caches.l2, Some(image::qcow2::L2CacheSize::Bytes(2 << 20)));
    assert_eq!(qcow2.caches.total_bytes, Some(4 << 20));
    let files: Vec<_> = qcow2.secrets.iter().map(ToString::to_string).collect();
    assert_eq!(files, ["/etc/weir/a", "/b"]);
    assert_eq!(plan.process.image_root.as_ref().unwrap().to_str(), Some("/etc/weir/images"));
    check_disk(
        "l2-cache-size = 1\nrefcount-cache-size = 1\ncache-size = 1",
        "cache-size, l2-cache-size and refcount-cache-size may not be set together (leave one out)",
    );
}

#[test]
fn endpoints_are_checked_against_each_other() {
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
    // Different notations of one path are recognized.
    for line in ["nbd", "qmp", "metrics", "http"] {
        let both = format!("{line} = \"unix:/etc/weir/./a\"\npid-file = \"a\"");
        check_daemon(&both, "a socket uses this path (choose another file)");
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
    // Credentials without TLS are an error, so that no typo disables encryption.
    for line in ["tls-psk = \"k\"", "tls-certificates = \"k\"", "tls-verify-peer = true"] {
        check_daemon(line, "is not used, because tls is off (set tls to on or required)");
    }
    check(
        &daemon_with("tls = \"on\"\ntls-psk = \"k\"\ntls-certificates = \"d\""),
        "weir.toml:3: daemon.tls-psk = \"k\": tls-certificates is given too (choose certificates or keys)",
    );
    check_daemon(
        "tls = \"on\"\ntls-psk = \"k\"\ntls-verify-peer = true",
        "has no effect with tls-psk (the keys verify clients)",
    );
    let with_export = "[disk.a]\nimage = \"null:1\"\nexport = { type = \"nbd\", listen = \"h:1\" }\n";
    check(
        &format!("[daemon]\nnbd = \"h:2\"\n{with_export}"),
        "weir.toml:2: daemon.nbd = \"h:2\": is not used, because every disk has its own exports (remove it)",
    );
    // Disks may come from other hosts of a cluster, and the last disk may leave.
    for disks in ["", with_export] {
        let cluster = format!("[cluster]\nname = \"lab\"\netcd = \"http://e:2379\"\n{disks}");
        let endpoints =
            |plan: DesiredState| plan.servers.into_iter().map(|server| server.endpoint).collect::<Vec<_>>();
        let at = |address: &str| ListenEndpoint::Address(address.parse().unwrap());
        let expected: Vec<_> = (!disks.is_empty()).then(|| at("h:1")).into_iter().collect();
        let configured = plan_with(&format!("[daemon]\nnbd = \"h:2\"\n{cluster}"), 0).unwrap();
        assert_eq!(endpoints(configured), [vec![at("h:2")], expected.clone()].concat());
        let passed = plan_with(&cluster, 2).unwrap();
        assert_eq!(endpoints(passed), [vec![ListenEndpoint::Inherited], expected.clone()].concat());
        assert_eq!(endpoints(plan_with(&cluster, 0).unwrap()), expected);
    }
    assert_eq!(
        plan_with(with_export, 2).unwrap_err(),
        "LISTEN_FDS: sockets passed by the service manager (2) are not used, because every disk \
         has its own exports (pass only those that exports use as fd:NAME)"
    );
    check(
        &daemon_with("nbd = [\"h:2\", \"h:2\"]"),
        "weir.toml:2: daemon.nbd[1] = \"h:2\": is given twice (remove one)",
    );
    let disk = "[disk.a]\nimage = \"null:1\"\n";
    assert_eq!(plan_with(disk, 1).unwrap().servers[0].endpoint, ListenEndpoint::Inherited);
    // An endpoint that only explicit exports name serves no other disks, even if it is the default
    // one.
    let at_default = with_export.replace("h:1", "localhost:10809");
    let without_export = disk.replace("disk.a", "disk.b");
    for (text, inherited, expect) in [
        (with_export.to_owned(), 0, vec![None]),
        (at_default.clone(), 0, vec![None]),
        (disk.to_owned(), 0, vec![Some(false)]),
        (disk.to_owned(), 1, vec![Some(false)]),
        (format!("{at_default}{without_export}"), 0, vec![Some(false)]),
        (format!("[daemon]\nnbd = \"h:2\"\n{with_export}{without_export}"), 0, vec![None, Some(false)]),
        (
            format!(
                "[daemon]\nnbd = \"h:2\"\n[cluster]\nname = \"lab\"\netcd = \"http://e:2379\"\n{with_export}"
            ),
            0,
            vec![Some(false), None],
        ),
    ] {
        let plan = plan_with(&text, inherited).unwrap();
        assert_eq!(
            plan.servers.iter().map(|server| server.default_read_only).collect::<Vec<_>>(),
            expect,
            "{text}"
        );
    }
    assert_eq!(
        plan_with(&format!("[daemon]\nnbd = \"h:2\"\n{disk}"), 1).unwrap_err(),
        "weir.toml:2: daemon.nbd = \"h:2\": the service manager passed sockets too, in LISTEN_FDS \
         (use one or the other)"
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
         is not an export type; known are \
         \"nbd\", \"vhost-user-blk\", \"ublk\", \"fuse\" and \"nbd-device\"",
    );
}

#[test]
fn access_rules_need_a_matching_endpoint_and_tls() {
    let tls = "tls = \"required\"\ntls-psk = \"keys\"\n";
    let disk = |keys: &str| format!("[disk.vm1]\nimage = \"null:1G\"\n{keys}");
    let daemon = |keys: &str| format!("[daemon]\n{keys}\n{}", disk(""));
    let unix = "nbd = \"unix:s\"\n";
    let no_server = "no server listens on the network";
    for (text, expect) in [
        (
            daemon("allow = \"10.1.0.0/8\""),
            "daemon.allow = \"10.1.0.0/8\": has bits set beyond its prefix length",
        ),
        (
            daemon("deny = [\"::1\", \"::1/128\"]"),
            "daemon.deny[1] = \"::1/128\": this network is given twice",
        ),
        (daemon(&format!("{unix}allow = \"::1\"")), no_server),
        (daemon(&format!("{unix}max-connections-per-address = 1")), no_server),
        (disk("allow = \"::1\"\nexport = { type = \"nbd\", listen = \"unix:s\" }"), no_server),
        (disk("deny = \"::1\"\nexport = { type = \"vhost-user-blk\", listen = \"unix:s\" }"), no_server),
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
        let error = plan_with(&text, 0).unwrap_err();
        assert!(error.contains(expect), "{text}: {error}");
    }
    let plan = plan(&format!("[daemon]\n{tls}{}", disk("deny = \"::1\"\ntls-authz = [\"a\", \"b*\"]")));
    assert!(plan.process.access.allows_all() && !plan.disks[0].access.allows_all());
}

//! Command lines that are accepted, and the messages for those that are not.

use clap::Parser as _;
use policy::throttle::LimitKind;
use settings::{DesiredState, ListenAddress, ListenEndpoint, ThrottleConfig};
use storage::ImageFormat;

use super::*;

#[derive(Debug, clap::Parser)]
struct ServeCommandLine {
    #[command(flatten)]
    arguments: ServeArgs,
}

/// Plan of a command line after `weir serve`, or the message after `weir: ` on standard error.
fn plan(line: &str) -> Result<DesiredState, String> {
    let command_line = ["serve"].into_iter().chain(line.split_whitespace());
    let ServeCommandLine { arguments } = ServeCommandLine::try_parse_from(command_line).map_err(|error| {
        let text = error.render().to_string();
        text.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default().to_owned()
    })?;
    arguments.check_disks()?;
    arguments
        .into_parsed_config()
        .and_then(|parsed| DesiredState::new(parsed, 0))
        .map_err(|wrong| wrong.to_string())
}

#[track_caller]
fn check(line: &str, expect: &str) {
    assert_eq!(plan(line).unwrap_err(), expect, "{line}");
}

#[test]
fn image_alone_has_the_default_settings() {
    let plan = plan("vm1.raw").unwrap();
    assert_eq!(plan.disks[0].image, "vm1.raw".parse().unwrap());
    assert_eq!((plan.disks[0].settings, &plan.disks[0].group), (ThrottleConfig::default(), &None));
    assert_eq!(plan.servers[0].endpoint, ListenEndpoint::Address(ListenAddress::nbd_default()));
    assert_eq!(plan.servers[0].exports[0].name, "vm1");
}

#[test]
fn part_implies_raw_and_snapshot_implies_read_only() {
    let part = plan("vm1.raw -o offset=1M,size=4K").unwrap();
    assert_eq!(part.disks[0].part, Some("offset=1M,size=4K".parse().unwrap()));
    assert_eq!(part.disks[0].format, Some(ImageFormat::Raw), "what it begins with says nothing");
    let snapshots = plan("a.q a.q -f qcow2 --snapshot 1 --name x --name y").unwrap();
    assert!(snapshots.disks.iter().all(|disk| disk.read_only && disk.snapshot.as_deref() == Some("1")));
    let unnamed = plan("vm1.raw --name=").unwrap();
    assert_eq!((&*unnamed.disks[0].name, &*unnamed.servers[0].exports[0].name), ("vm1", ""));
    check(
        "a -o size=1 -f qcow2",
        "--options size=1: is for raw images, and this one is qcow2 (leave it out)",
    );
    check("a -o size=1 --snapshot s", "--snapshot s: is for qcow2 images, and --options size=1 for raw ones");
    check("a -f raw --snapshot s", "--snapshot s: is for qcow2 images, and this one is raw (leave it out)");
}

#[test]
fn socket_mode_and_owner_use_chmod_and_chown_notation() {
    let service = plan("a").unwrap().process;
    assert_eq!((&service.sockets, service.exit_when_idle), (&settings::SocketAccess::default(), false));
    let service = plan("a --socket-mode 0660 --socket-owner :kvm --exit-when-idle").unwrap().process;
    assert_eq!((service.sockets.mode, &service.sockets.owner), (0o660, &Some(":kvm".parse().unwrap())));
    assert!(service.exit_when_idle);
}

#[test]
fn limits_have_the_names_of_qemu() {
    let plan =
        plan("a --iops-total 1000 --iops-total-max 5000 --iops-total-max-length 5 --bps-write 10M").unwrap();
    let limits = plan.disks[0].settings.limits;
    let iops = limits.limit(LimitKind::IopsTotal);
    assert_eq!((iops.rate, iops.burst_rate, iops.burst_length_s), (1000, 5000, 5));
    assert_eq!(limits.limit(LimitKind::BpsWrite).rate, 10 << 20);
}

#[test]
fn limits_apply_to_the_group_or_to_each_disk() {
    let shared = plan("a b --group g --iops-total 10").unwrap();
    assert_eq!(shared.groups.len(), 1);
    assert_eq!(shared.groups[0].settings.limits.limit(LimitKind::IopsTotal).rate, 10);
    assert!(
        shared
            .disks
            .iter()
            .all(|disk| disk.group.as_deref() == Some("g") && disk.settings == ThrottleConfig::default())
    );
    let individual = plan("a b --iops-total 10").unwrap();
    assert!(individual.groups.is_empty());
    assert!(individual.disks.iter().all(|disk| disk.group.is_none()));
    assert!(individual.disks.iter().all(|disk| disk.settings == shared.groups[0].settings));
}

#[test]
fn group_gets_all_settings_except_the_weight() {
    let options = "--weight 300 --iops-reservation 50 --bps-reservation 1M --watermark 90";
    let single = plan(&format!("a {options}")).unwrap();
    let all = ThrottleConfig {
        weight: 300,
        iops_reservation: 50,
        bps_reservation: 1 << 20,
        watermark: 90,
        ..ThrottleConfig::default()
    };
    assert_eq!(single.disks[0].settings, all);
    let shared = plan(&format!("a b --group g {options}")).unwrap();
    assert_eq!(shared.groups[0].settings, ThrottleConfig { weight: 100, ..all });
    let weighted = ThrottleConfig { weight: 300, ..ThrottleConfig::default() };
    assert!(shared.disks.iter().all(|disk| disk.settings == weighted && disk.group.as_deref() == Some("g")));
}

#[test]
fn group_cannot_have_the_name_of_a_disk() {
    check("a.raw --group a", "--group a: a disk is named \"a\" too, and commands accept both (rename one)");
}

#[test]
fn control_sockets_are_unix_sockets() {
    let service = plan("a --qmp unix:/run/q --qmp unix:r --state /s").unwrap().process;
    assert_eq!(service.qmp, [PathBuf::from("/run/q"), PathBuf::from("r")]);
    assert_eq!(service.state, Some(PathBuf::from("/s")));
    check("a --qmp unix:q --qmp unix:q", "--qmp unix:q: is given twice (remove one)");
}

#[test]
fn every_disk_is_exported_at_every_nbd_address() {
    let plan = plan("a b --nbd unix:/s --nbd localhost:0").unwrap();
    assert_eq!(plan.servers.len(), 2);
    assert!(plan.servers.iter().all(|server| server.exports.len() == 2));
}

#[test]
fn nbd_may_be_read_only_beside_another_export() {
    let read_only = |line: &str| {
        let servers = plan(line).unwrap().servers;
        servers.iter().map(|server| server.exports[0].read_only).collect::<Vec<_>>()
    };
    assert_eq!(read_only("a --vhost-user-blk unix:v --nbd unix:n,read-only --nbd unix:m"), [true, false]);
    assert_eq!(read_only("a --nbd unix:n --nbd localhost:1,read-only=on"), [false, true]);
    check("a --nbd unix:n --nbd unix:n,read-only", "--nbd unix:n,read-only=on: is given twice (remove one)");
}

#[test]
fn socket_paths_are_compared_after_normalization() {
    let here = std::env::current_dir().unwrap();
    let absolute = format!("unix:{}/s", here.display());
    let rule = "another export has the same address (choose another)";
    for other in ["unix:./s", &absolute] {
        check(
            &format!("a b --vhost-user-blk unix:s --vhost-user-blk {other}"),
            &format!("--vhost-user-blk {other}: {rule}"),
        );
        check(
            &format!("a --vhost-user-blk {other} --nbd unix:s"),
            &format!("--vhost-user-blk {other}: {rule}"),
        );
        check(
            &format!("a --nbd unix:s --qmp {other}"),
            &format!("--qmp {other}: disks are exported at this socket (use another)"),
        );
    }
}

#[test]
fn names_apply_to_images_in_order() {
    let named = plan("memory:1 memory:1 --name x --name y --description one --description two").unwrap();
    assert_eq!((named.disks[0].name.as_str(), named.disks[1].description.as_str()), ("x", "two"));
    check("a b --name x", "--name: times given: 1, images: 2 (give one for each, in their order)");
    check("memory:1 memory:1", "memory:1: another disk is named \"memory\" (set unique names with --name)");
}

#[test]
fn burst_rate_below_the_rate_is_rejected() {
    check(
        "a --iops-total 1000 --iops-total-max 500",
        "--iops-total-max 500: is below iops-total (1000); a burst rate must be at least the rate",
    );
}

#[test]
fn invalid_values_are_rejected() {
    check(
        "a --cache fast",
        "invalid value 'fast' for '--cache <MODE>': \
         is not a cache mode (writeback, writethrough, none, directsync, unsafe)",
    );
    check(
        "a --bps-total 10Q",
        "invalid value '10Q' for '--bps-total <SIZE>': is not a size (a number of bytes, perhaps \
         with K, M, G, T, P or E for powers of 1024: 512, 64K, 1.5G; KB is 1000, and so on)",
    );
    check(
        "a --max-connections 5000000000",
        "invalid value '5000000000' for '--max-connections <N>': \
         is too large; it may be 4294967295 at most, or 0 for any number",
    );
    check("a --workers 0", "--workers 0: is out of range; it must be from 1 to 256");
    check(
        "a --poll 2s",
        "invalid value '2s' for '--poll <TIME|auto|off>': is too long; it must be at most 1s (0 never polls)",
    );
    check("a --tls on", "--tls on: has no credentials (set tls-certificates or tls-psk)");
}

#[test]
fn nbd_options_without_nbd_are_rejected() {
    let rule = "is not used, because no disk is exported over NBD (remove it, or add an NBD export)";
    for (options, place) in [
        ("--tls required --tls-psk keys", "--tls required"),
        ("--max-connections 5", "--max-connections 5"),
        ("--description one", "--description one"),
    ] {
        check(&format!("a --vhost-user-blk unix:v {options}"), &format!("{place}: {rule}"));
        assert!(plan(&format!("a --vhost-user-blk unix:v --nbd unix:n {options}")).is_ok());
    }
    assert!(plan("a --vhost-user-blk unix:v --tls off").is_ok());
    let several = plan("a --vhost-user-blk unix:v --vhost-user-blk unix:w").unwrap();
    assert_eq!(several.exports.iter().map(|export| export.disk).collect::<Vec<_>>(), [0, 0]);
}

#[test]
fn prefetch_options_apply_to_every_disk() {
    use policy::prefetch::{PrefetchConfig, PrefetchMode};
    assert_eq!(plan("a").unwrap().disks[0].prefetch, PrefetchConfig::default());
    let numbers = "--prefetch-memory 64M --prefetch-largest-request 1M --prefetch-window-min 64K \
                   --prefetch-window-max 8M --prefetch-streams 7";
    let expect = PrefetchConfig {
        mode: PrefetchMode::Off,
        memory_bytes: 64 << 20,
        largest_request_bytes: 1 << 20,
        window_min_bytes: 64 << 10,
        window_max_bytes: 8 << 20,
        streams: 7,
    };
    let planned = plan(&format!("a b --prefetch off {numbers}")).unwrap();
    assert!(planned.disks.iter().all(|disk| disk.prefetch == expect), "numbers are kept for later");
}

#[test]
fn qcow2_options_apply_to_every_disk() {
    let planned =
        plan("a b --format qcow2 --l2-cache-size full --cache-clean-interval 5 --secret-fd 3").unwrap();
    for disk in &planned.disks {
        assert_eq!(disk.qcow2.caches.l2, Some(image::qcow2::L2CacheSize::Full));
        assert_eq!(disk.qcow2.caches.clean_interval.as_secs(), 5);
        assert_eq!(disk.qcow2.secrets, [SecretSource::Descriptor(3)]);
    }
    let refused = plan("a --format raw --refcount-cache-size 1M").unwrap_err();
    assert_eq!(refused, "--refcount-cache-size 1M: is for qcow2 images, and this one is raw (leave it out)");
    assert!(plan("a --secret-file k --secret-fd 3").unwrap_err().contains("cannot be used with"));
}

#[test]
fn options_that_repeat_the_config_file_are_rejected() {
    for (options, named) in [
        ("a", "[IMAGE]..."),
        ("--cache none", "--cache <MODE>"),
        ("--iops-total 5", "--iops-total <N>"),
        ("--group g", "--group <GROUP>"),
        ("--weight 5", "--weight <N>"),
        ("--watermark 5", "--watermark <PERCENT>"),
        ("--delay read=1ms", "--delay <TIMES>"),
        ("--l2-cache-size full", "--l2-cache-size <SIZE>"),
        ("--secret-file key", "--secret-file <FILE>"),
        ("--prefetch on", "--prefetch <MODE>"),
        ("--prefetch-memory 1M", "--prefetch-memory <SIZE>"),
    ] {
        let refused = plan(&format!("--config f {options}")).unwrap_err();
        let both = refused.contains("'--config <FILE>'") && refused.contains(&format!("'{named}'"));
        assert!(both && refused.contains(" cannot be used with "), "{refused}");
    }
    let command_line =
        ["serve", "--config", "f", "--workers", "2", "--nbd", "h:1", "--log", "debug", "--qmp", "unix:q"];
    assert!(
        ServeCommandLine::try_parse_from(command_line).is_ok(),
        "what holds for the process goes with a file"
    );
}

#[test]
fn image_or_config_file_is_required() {
    for line in ["", "--iops-total 5"] {
        let error = plan(line).unwrap_err();
        assert!(error.starts_with("neither an image nor a config file is given (name an IMAGE"), "{error}");
    }
}

//! Rejected config files, each with origin and rule.

use super::*;

#[test]
fn syntax_errors_name_their_line() {
    let refused = plan_with("[disk.vm1]\nimage = \n", 0).unwrap_err();
    assert!(refused.starts_with("weir.toml:2: not TOML: "), "{refused}");
    let duplicate = plan_with("[disk.vm1]\nimage = \"a\"\nimage = \"b\"\n", 0).unwrap_err();
    let already = "is given twice (remove one)";
    assert_eq!(duplicate, format!("weir.toml:3: disk.vm1.image: {already}"));
    for (text, expect) in [
        ("a = 1\na = 2\n", "2: a"),
        ("[disk.vm1]\nimage = \"a\"\n[group.g]\n[disk.vm1]\nimage = \"b\"\n", "4: disk.vm1"),
        ("[disk.vm1]\nexport = { type = \"nbd\", type = \"nbd\" }\n", "2: disk.vm1.type"),
        ("[daemon]\n\"nbd\" = 1\nnbd = 2\n", "3: daemon.nbd"),
    ] {
        let error = plan_with(text, 0).unwrap_err();
        assert_eq!(error, format!("weir.toml:{expect}: {already}"));
    }
    // The parser bounds its recursion.
    let nested = "a = ".to_owned() + &"[".repeat(100_000);
    assert!(plan_with(&nested, 0).unwrap_err().starts_with("weir.toml:1: not TOML: "));
}

#[test]
fn names_are_required_unique_and_known() {
    check(
        &disk_with("cahce = \"none\""),
        "weir.toml:3: disk.vm1.cahce: unknown key (did you mean \"cache\"?)",
    );
    check(
        &disk_with("iops_total = 5"),
        "weir.toml:3: disk.vm1.iops_total: unknown key (did you mean \"iops-total\"?)",
    );
    check(
        "[daemon]\nsocket-mode = 0o660\n",
        "weir.toml:2: daemon.socket-mode = 0o660: is not a decimal number (write it as text, such \
         as \"0660\")",
    );
    check("[disks.vm1]\nimage = \"a\"\n", "weir.toml:1: disks: unknown key (did you mean \"disk\"?)");
    check("[group.g]\niops = 5\n", "weir.toml:2: group.g.iops: unknown key (did you mean \"iops-total\"?)");
    check(
        &disk_with("export = [{ type = \"nbd\", listen = \"h:1\", zzz = 1 }]"),
        "weir.toml:3: disk.vm1.export[0].zzz: unknown key; known are type, listen, name, read-only",
    );
    check(
        "[disk.vm1]\n",
        "weir.toml:1: disk.vm1: no image (add image = \"PATH\", \"memory:SIZE\", \"null:SIZE\", \
         \"rbd:POOL/IMAGE\" or \"nbd://HOST/EXPORT\")",
    );
    check("", "no disks: there is nothing to serve (add a [disk.NAME] with an image)");
    check(&disk_with("[disk.\"\"]\nimage = \"b\""), "weir.toml:3: disk.\"\": the name is empty (set one)");
    check(
        &disk_with("[disk.\"a\\nb\"]\nimage = \"b\""),
        "weir.toml:3: disk.\"a\\nb\": the name has a control character (remove it)",
    );
    check(
        &disk_with("[disk.\"..\"]\nimage = \"b\""),
        "weir.toml:3: disk.\"..\": the name has a special meaning in paths (choose another)",
    );
    check_disk("group = \"silver\"", "is not a group of this file (add [group.silver])");
    check(
        &disk_with("group = \"glod\"\n[group.gold]"),
        "weir.toml:3: disk.vm1.group = \"glod\": is not a group of this file (did you mean \"gold\"?)",
    );
    check(
        "[disk.gold]\nimage = \"a\"\n[group.gold]\n",
        "weir.toml:3: group.gold: a disk is named \"gold\" too, and commands accept both (rename one)",
    );
}

#[test]
fn invalid_values_name_their_rule() {
    check_disk("cache = \"fast\"", "is not a cache mode (writeback, writethrough, none, directsync, unsafe)");
    check_disk("format = \"vmdk\"", "is not a format that weir serves (raw, qcow2)");
    check_disk("read-only = 1", "is not a flag; write true or false");
    check_disk("cache = true", "is a boolean; a string or a number is required");
    check_disk("cache = []", "is an array; a string or a number is required (write one, without brackets)");
    check_disk(
        "iops-total = 1.5",
        "is not a plain number; a count takes no suffix and no fraction (write 1)",
    );
    check_disk("iops-total = -5", "is not a whole number of 0 or more");
    check_disk("iops-total = inf", "is not a whole number of 0 or more");
    check_disk(
        "bps-read = \"10 MB\"",
        "is not a size (a number of bytes, perhaps with K, M, G, T, P or E for powers of 1024: \
         512, 64K, 1.5G; KB is 1000, and so on)",
    );
    check(
        &disk_with("export = { type = \"fuse\", file = \"f\", io-uring = true }"),
        "weir.toml:3: disk.vm1.export.io-uring = true: was removed in weir 0.2.0; requests are \
         read from /dev/fuse (remove the key)",
    );
    check_disk("export = []", "is empty (remove the key, or set a value)");
    check_disk("export = \"nbd\"", "is not a table; write its settings as KEY = VALUE lines below it");
    check_daemon(
        "record = \"day\"",
        "is not a table; write record = { directory = \"day\" }, with keep and limit to change \
         their defaults",
    );
    check_daemon(
        "nbd = \"localhost\"",
        "has no port (write localhost:PORT, such as localhost:10809, or unix:PATH)",
    );
    check_daemon("workers = 0", "is out of range; it must be from 1 to 256");
    check_daemon("memory = \"1M\"", "is too small; it must be at least 128M");
    check_daemon("poll = \"2s\"", "is too long; it must be at most 1s (0 never polls)");
    check_daemon("log-format = \"xml\"", "is not a log format (text, json)");
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
        "weir.toml:4: disk.vm1.watermark = 50: the disk is in group \"gold\", whose watermark \
         applies to its members (set it in [group.gold])",
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
    check_disk("force-share = true", "needs read-only, because another program may write to the image");
    // A long value is cut at a character boundary.
    let text = format!("[disk.vm1]\nimage = \"a\"\ncache = \"{}\"\n", "é".repeat(100_000));
    let refused = plan_with(&text, 0).unwrap_err();
    assert!(refused.contains("ééé…: is not a cache mode"), "{refused}");
    assert!(refused.len() < 300);
}

/// Asserts all mistakes of a file.
#[track_caller]
fn check_all(text: &str, expect: &[&str]) {
    let diagnostics = Diagnostics::default();
    let parsed =
        parse_with_options("f", text, Path::new("/etc/weir"), &ConfigWithOrigins::default(), &diagnostics);
    let all = DesiredState::with_diagnostics(parsed, 0, diagnostics).map(drop).err().unwrap_or_default();
    let all: Vec<_> = all.iter().map(ToString::to_string).collect();
    let is_expected = |(message, expect): (&String, &&str)| message.starts_with(expect);
    assert!(all.len() == expect.len() && all.iter().zip(expect).all(is_expected), "{all:#?}\n{text}");
}

#[test]
fn all_mistakes_are_reported_in_file_order() {
    // Mistakes within one table. If a value of the table is unreadable, only rules of single values
    // are checked.
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
            "f:15: daemon.memory = \"1M\": is too small",
            "f:16: daemon.user = \":disk\": has no user",
            "f:17: daemon.zzz: unknown key",
            "f:19: disk.c: no image",
            "f:21: group.gold.iops-totl: unknown key",
            "f:23: group.tin.watermark = 101: is out of range",
            "f:24: group.tin.iops-reservation = 1000000000000001: is too large",
            "f:25: group.tin.group = \"tinn\": is not a group of this file (did you mean \"tin\"?)",
            "f:26: zzz: unknown key",
        ],
    );
    // A group with a mistake exists for its members, which report nothing.
    check_all(
        "[group.gold]\niops-totl = 1\n[disk.a]\nimage = \"a\"\ngroup = \"gold\"\n\
         [disk.b]\nimage = \"b\"\ngroup = \"tin\"\n",
        &["f:2: group.gold.iops-totl", "f:8: disk.b.group = \"tin\": is not a group of this file"],
    );
    // Rules between tables are checked if all tables are readable.
    let device = "export = { type = \"vhost-user-blk\", listen = \"unix:s\" }";
    check_all(
        &format!(
            "[disk.a]\nimage = \"x\"\n{device}\n[disk.b]\nimage = \"x\"\nweight = 0\n{device}\n\
             allow = \"::1\"\n[daemon]\nmetrics = \"unix:s\"\nworkers = 0\n"
        ),
        &[
            "f:5: disk.b.image = \"x\": another disk uses this image",
            "f:6: disk.b.weight = 0: is out of range",
            "f:7: disk.b.export.listen = \"unix:s\": another export has the same address",
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
    // Consequences of a mistake are not reported.
    check_all(
        "[daemon]\nnbd = \"h\"\ntls = \"on\"\n[disk.a]\nimage = \"a\"\nallow = \"::1\"\ntls-authz = \"a\"\n\
         [disk.b]\nimage = \"b\"\niops-total = \"x\"\niops-total-max = 5\n",
        &["f:2: daemon.nbd = \"h\"", "f:10: disk.b.iops-total = \"x\""],
    );
    check_all("[disk.a]\nimage = 5.5.5\n", &["f:2: not TOML"]);
}

#[test]
fn reported_mistakes_are_bounded() {
    let disk = |n: usize| format!("[disk.d{n}]\nimage = \"null:1\"\ngroup = \"g\"\n");
    let text: String = (0..1000).map(disk).collect();
    let diagnostics = Diagnostics::default();
    let parsed = parse_with_options("f", &text, Path::new(""), &ConfigWithOrigins::default(), &diagnostics);
    assert_eq!(DesiredState::with_diagnostics(parsed, 0, diagnostics).unwrap_err().len(), 100);
    let text: String = (0..1000).map(|n| format!("k{n} = 1\n")).collect();
    let diagnostics = Diagnostics::default();
    parse_with_options("f", &text, Path::new(""), &ConfigWithOrigins::default(), &diagnostics);
    assert!(diagnostics.is_full());
}

#[test]
fn group_cycles_are_rejected() {
    let disk = "[disk.vm1]\nimage = \"a\"\n";
    let chain = |count: usize| -> String {
        let group = |n: usize| match n {
            0 => "[group.g0]\n".to_owned(),
            n => format!("[group.g{n}]\ngroup = \"g{}\"\n", n - 1),
        };
        (0..count).rev().map(group).collect()
    };
    // Listed in reverse, but created parents first.
    let desired = plan(&format!("{disk}{}", chain(8)));
    let names: Vec<_> = desired.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7"]);
    check(
        &format!("{disk}{}", chain(9)),
        "weir.toml:4: group.g8.group = \"g7\": \
         nests 9 groups; at most 8 are possible (remove some)",
    );
    check(
        &format!("{disk}[group.a]\ngroup = \"a\"\n"),
        "weir.toml:4: group.a.group = \"a\": is the group itself (name another, or remove the key)",
    );
    check(
        &format!("{disk}[group.z]\ngroup = \"a\"\n[group.a]\ngroup = \"b\"\n[group.b]\ngroup = \"a\"\n"),
        "weir.toml:6: group.a.group = \"b\": puts the group into itself, through b (break the cycle)",
    );
    check(
        &format!("{disk}[group.a]\ngroup = \"c\"\n"),
        "weir.toml:4: group.a.group = \"c\": is not a group of this file (add [group.c])",
    );
    // A cycle of this size must neither overflow the stack nor take quadratic time.
    let count = 100_000;
    let group = |n: usize| format!("[group.g{n}]\ngroup = \"g{}\"\n", (n + 1) % count);
    let text: String = (0..count).map(group).collect();
    let refused = plan_with(&format!("[disk.d]\nimage = \"a\"\n{text}"), 0).unwrap_err();
    let expect = "weir.toml:4: group.g0.group = \"g1\": \
                  puts the group into itself, through g1, g2, g3, g4 and 99995 more (break the cycle)";
    assert_eq!(refused, expect);
}

#[test]
fn latency_targets_are_checked() {
    let range = "is out of range; a latency target is from 10us to 100s (0 is none)";
    check_disk("latency-target = \"1us\"", range);
    check_disk("latency-target = \"200s\"", range);
    check_disk("latency-target = 5", "has no unit (write 5s for seconds, or 5ms)");
    let percentile = "is no percentile from 50 to 99.99 with at most two decimals (write 99 or 99.9)";
    check_disk("latency-target = \"5ms\"\nlatency-percentile = 49", percentile);
    check_disk("latency-target = \"5ms\"\nlatency-percentile = 100", percentile);
    let floor =
        "is no percentage of the device from 0 to 100 with at most two decimals (write 5, or default)";
    check_disk("latency-floor = 101", floor);
    let alone = "has no effect without latency-target (set latency-target too)";
    check_disk("latency-percentile = 95", alone);
    check_disk("latency-target = 0\nlatency-of = \"reads\"", alone);
    check(
        "[group.g]\nlatency-target = \"5ms\"\n[group.h]\ngroup = \"g\"\n[disk.a]\nimage = \"a\"\n\
         group = \"h\"\nlatency-target = \"1ms\"\n",
        "weir.toml:8: disk.a.latency-target = \"1ms\": cannot be set inside group \"g\", which has a \
         latency-target for all its disks together (remove one of them)",
    );
    check(
        "[group.g]\nlatency-target = \"5ms\"\n[group.h]\ngroup = \"g\"\nlatency-target = \"1ms\"\n\
         [disk.a]\nimage = \"a\"\n",
        "weir.toml:5: group.h.latency-target = \"1ms\": cannot be set inside group \"g\", which has a \
         latency-target for all its disks together (remove one of them)",
    );
}

#[test]
fn targets_without_neighbours_are_remarked() {
    let remarked = |text: &str| -> Vec<String> {
        let plan = plan(text);
        plan.ineffective_settings()
            .into_iter()
            .map(|remark| format!("{}: {}", remark.name, remark.remark))
            .collect()
    };
    let remark = |name: &str| {
        format!(
            "{name}: no other disk of this file can be on the same device, so there is no disk to throttle \
             for the latency-target"
        )
    };
    let target = "latency-target = \"5ms\"\n";
    let file = |name: &str, more: &str| format!("[disk.{name}]\nimage = \"{name}\"\n{more}");
    let memory = |name: &str, more: &str| format!("[disk.{name}]\nimage = \"memory:1M\"\n{more}");
    assert_eq!(remarked(&file("a", target)), [remark("a")]);
    assert_eq!(remarked(&(file("a", target) + &memory("b", ""))), [remark("a")]);
    assert!(remarked(&(file("a", target) + &file("b", ""))).is_empty());
    let shared = "rate = \"iops=100,shared=x\"\n";
    let own = "rate = \"iops=100\"\n";
    assert_eq!(remarked(&(memory("a", &(own.to_owned() + target)) + &memory("b", own))), [remark("a")]);
    assert!(remarked(&(memory("a", &(shared.to_owned() + target)) + &memory("b", shared))).is_empty());
    let group = format!("[group.g]\n{target}");
    let members = file("a", "group = \"g\"\n") + &file("b", "group = \"g\"\n");
    assert_eq!(remarked(&(group.clone() + &members)), [remark("g")]);
    assert!(remarked(&(group + &members + &file("c", ""))).is_empty());
}

#[test]
fn settings_without_effect_are_remarked() {
    let remarks = |text: &str| -> Vec<String> {
        let plan = plan(text);
        plan.ineffective_settings()
            .into_iter()
            .map(|remark| format!("{}: {}", remark.name, remark.remark))
            .collect()
    };
    let without_effect = "[disk.a]\nimage = \"a\"\nweight = 200\nwatermark = 90\n";
    assert_eq!(
        remarks(without_effect),
        [
            "a: the weight has no effect, because the disk is in no group (set group)",
            "a: the watermark has no effect, because there are no limits to lift (set some)",
        ]
    );
    let groups = "[group.x]\n[group.y]\nwatermark = 5\niops-reservation = 5\n[group.z]\ngroup = \"y\"\n";
    let member = "[disk.a]\nimage = \"a\"\ngroup = \"z\"\nweight = 200\niops-reservation = 5\n";
    assert_eq!(
        remarks(&format!("{groups}{member}")),
        [
            "x: no disk is in this group",
            "y: the reservation has no effect, because the disk is in no group (set group)",
            "y: the watermark has no effect, because there are no limits to lift (set some)",
        ]
    );
    let machine = |name: &str, more: &str| {
        format!(
            "[disk.{name}]\n\
             image = \"{name}\"\n\
             export = {{ type = \"vhost-user-blk\", listen = \"unix:{name}\" {more} }}\n"
        )
    };
    // The names differ only after the 20 bytes that a guest reads.
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
fn old_names_of_keys_are_read_with_a_warning() {
    let file = |lines: &str| {
        format!(
            "[cluster]\nname = \"lab\"\nhost = \"a\"\netcd = \"http://e:2379\"\n\
             peer-address = \"10.0.0.1:7600\"\n{lines}"
        )
    };
    let [old, new] = ["safe", "fallback"].map(|name| plan(&file(&format!("{name}-share = \"0.5%\"\n"))));
    assert_eq!(old.process.cluster, new.process.cluster);
    let warnings = |plan: &DesiredState| -> Vec<String> {
        plan.ineffective_settings()
            .into_iter()
            .map(|remark| format!("{}: {}", remark.name, remark.remark))
            .collect()
    };
    assert_eq!(
        warnings(&old),
        ["cluster: safe-share is the old name of fallback-share (rename the key: the next release \
          refuses the old name)"]
    );
    assert!(warnings(&new).is_empty());
    check(
        &file("fallback-share = \"1%\"\nsafe-share = \"0.5%\"\n"),
        "weir.toml:7: cluster.safe-share = \"0.5%\": is the old name of fallback-share, which is \
         given too (remove it)",
    );
}

#[test]
fn two_writers_of_one_image_are_rejected() {
    let two_disks = |first: &str, second: &str| {
        format!("[disk.a]\nimage = \"x.raw\"\n{first}\n[disk.b]\nimage = \"/etc/weir/x.raw\"\n{second}\n")
    };
    let rule = "weir.toml:5: disk.b.image = \"/etc/weir/x.raw\": \
                another disk uses this image (export one disk twice, or make both read-only)";
    // One writer is enough: the reader would see stale data.
    check(&two_disks("", ""), rule);
    check(&two_disks("read-only = true", ""), rule);
    check(&two_disks("", "read-only = true"), rule);
    assert_eq!(plan(&two_disks("read-only = true", "read-only = true")).disks.len(), 2);
}

#[test]
fn disks_on_one_simulated_device_need_equal_rates() {
    let two_disks = |first: &str, second: &str| {
        let disk = |name, rate| format!("[disk.{name}]\nimage = \"null:1\"\nrate = \"{rate}\"\n");
        disk("a", first) + &disk("b", second)
    };
    check(
        &two_disks("bytes=1M,shared=x", "bytes=2M,shared=x"),
        "weir.toml:6: disk.b.rate = \"bytes=2M,shared=x\": \
         another disk shares \"x\" with other rates (use the same rates, or another name)",
    );
    for second in ["shared=x,bytes=1M", "bytes=2M,shared=y", "bytes=2M"] {
        assert_eq!(plan(&two_disks("bytes=1M,shared=x", second)).disks.len(), 2);
    }
}

#[test]
fn export_names_are_unique_at_an_address() {
    let export = |name: &str| format!("export = {{ type = \"nbd\", listen = \"h:1\", name = \"{name}\" }}");
    let two_disks = |second: &str| {
        format!(
            "[disk.a]\nimage = \"null:1\"\n{}\n[disk.b]\nimage = \"null:1\"\n{}\n",
            export("x"),
            export(second)
        )
    };
    check(
        &two_disks("x"),
        "weir.toml:6: disk.b.export.name = \"x\": \
         another export has the name \"x\" at this address (choose another)",
    );
    assert_eq!(plan(&two_disks("y")).servers[0].exports.len(), 2);
}

#[test]
fn unreadable_files_are_named() {
    let error = load(Path::new("/nonexistent/weir.toml")).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/weir.toml: cannot be read: No such file"), "{error}");
}

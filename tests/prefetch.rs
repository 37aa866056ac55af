//! Prefetch settings: on the command line, in the config file, over QMP and with `weir prefetch`.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, Weir, assert_contains, nbdsh,
    operator::{find, run_failing, run_json, run_misused, run_ok, serve, socket, start, status},
    text,
};

#[track_caller]
fn settings(scratch: &Scratch, disk: &str) -> Value {
    run_json(scratch, &["prefetch", disk, "--json"])["prefetch"].clone()
}

/// The default settings of a disk, with `changed` applied.
fn defaults(changed: Value) -> Value {
    let mut settings = json!({
        "mode": "auto", "memory": 4 << 20, "largest-request": 64 << 10,
        "window-min": 128 << 10, "window-max": 2 << 20, "streams": 256
    });
    if let Value::Object(changed) = changed {
        settings.as_object_mut().expect("an object").extend(changed);
    }
    settings
}

#[test]
fn command_line_sets_every_disk() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    assert_eq!(settings(&scratch, "a"), defaults(json!({})));
    weir.stop();
    let numbers = ["--prefetch-memory", "64M", "--prefetch-window-max", "8M", "--prefetch-streams", "7"];
    let _weir = start(&scratch, &[&["--prefetch", "off"][..], &numbers].concat());
    let expect = json!({"mode": "off", "memory": 64 << 20, "window-max": 8 << 20, "streams": 7});
    for disk in ["a", "b"] {
        assert_eq!(
            settings(&scratch, disk),
            defaults(expect.clone()),
            "numbers are stored while prefetch is off"
        );
    }
}

fn config(scratch: &Scratch) -> String {
    format!(
        "[daemon]\n\
         qmp = \"{}\"\n\
         nbd = \"unix:{}\"\n\
         \n\
         [disk.a]\n\
         image = \"memory:1M\"\n\
         prefetch = true # why not\n\
         prefetch-largest-request = 4096\n\
         \n\
         [disk.b]\n\
         image = \"memory:1M\"\n\
         prefetch = false\n\
         \n\
         [disk.c]\n\
         image = \"memory:1M\"\n",
        socket(scratch),
        text(&scratch.socket("nbd"))
    )
}

#[test]
fn config_sets_each_disk_and_keeps_saved_changes() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    assert_eq!(settings(&scratch, "a"), defaults(json!({"mode": "on", "largest-request": 4096})));
    assert_eq!(settings(&scratch, "b"), defaults(json!({"mode": "off"})));
    assert_eq!(settings(&scratch, "c"), defaults(json!({})));

    let stdout = run_ok(&scratch, &["prefetch", "a", "auto", "--memory", "1G", "--save"]);
    assert_contains(&stdout, &["a: prefetch: on → auto\n", "a: prefetch-memory: 4M → 1G\n", "a: saved in "]);
    run_ok(&scratch, &["prefetch", "b", "--streams", "9", "--save"]);
    // Only the changed values differ; comments are kept.
    let expect = before
        .replace("prefetch = true #", "prefetch = \"auto\" #")
        .replace("= 4096\n", "= 4096\nprefetch-memory = \"1G\"\n")
        .replace("prefetch = false\n", "prefetch = false\nprefetch-streams = 9\n");
    assert_eq!(fs::read_to_string(&file).expect("the file exists"), expect);
    let live = ["a", "b", "c"].map(|disk| settings(&scratch, disk));
    weir.stop();
    let _weir = serve(&scratch, &file);
    assert_eq!(["a", "b", "c"].map(|disk| settings(&scratch, disk)), live);
}

#[test]
fn invalid_settings_fail_the_start() {
    let scratch = Scratch::new();
    let refused =
        |option: &str, value: &str| Serve::new(&scratch).args(["memory:1M", option, value]).rejects_usage();
    assert_contains(
        &refused("--prefetch", "yes"),
        &["--prefetch", "'yes'", "is not one of on, off and auto"],
    );
    let stderr = refused("--prefetch-memory", "255K");
    assert_contains(&stderr, &["--prefetch-memory 255K: is out of range; it may be from 256K to 1T"]);
    let stderr = refused("--prefetch-window-max", "64K");
    assert_contains(&stderr, &["--prefetch-window-max 64K: prefetch-window-min (131072) is above"]);
    let file = scratch.file("weir.toml", "[disk.a]\nimage = \"memory:1M\"\nprefetch-streams = 4097\n");
    let stderr = Serve::new(&scratch).at_given_addresses().arg("--config").arg(&file).fails();
    assert_contains(
        &stderr,
        &[":3: disk.a.prefetch-streams = 4097: is out of range; it may be from 1 to 4096"],
    );
}

#[test]
fn live_change_is_atomic() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &["--iops-total", "500"]);
    let stdout = run_ok(&scratch, &["prefetch", "a", "on", "--memory", "8M", "--window-min", "64K"]);
    let expect = "a: prefetch: auto → on\na: prefetch-memory: 4M → 8M\na: prefetch-window-min: 128K → 64K\n";
    assert_eq!(stdout, expect);
    let before = defaults(json!({"mode": "on", "memory": 8 << 20, "window-min": 64 << 10}));
    assert_eq!(settings(&scratch, "a"), before);
    assert_eq!(
        settings(&scratch, "b"),
        defaults(json!({})),
        "the setting of one disk does not affect another"
    );

    let stderr = run_misused(&scratch, &["prefetch", "a", "off", "--memory", "4K"]);
    assert_contains(&stderr, &["weir: --memory 4K: is out of range; it may be from 256K to 1T"]);
    let stderr = run_failing(&scratch, &["prefetch", "a", "off", "--window-max", "32K"]);
    assert_contains(&stderr, &["prefetch-window-min (65536) is above prefetch-window-max (32768)"]);
    let mut client = Qmp::negotiated(&scratch.socket("qmp"));
    // An invalid key beside a valid one, in either order.
    let (_, message) =
        client.command_error("x-weir-set", json!({"name": "a", "iops-total": 7, "prefetch-streams": 0}));
    assert_contains(&message, &["prefetch-streams", "(0)", "from 1 to 4096"]);
    let (_, message) =
        client.command_error("x-weir-set", json!({"name": "a", "prefetch": "off", "iops-total-max": 7}));
    assert_contains(&message, &["iops-total-max (7) is below iops-total (500)"]);
    let (_, message) =
        client.command_error("x-weir-set", json!({"name": "a", "prefetch": "off", "group": "nobody"}));
    assert_contains(&message, &["nobody"]);
    let (_, message) = client.command_error("x-weir-set", json!({"name": "a", "prefetch": true}));
    assert_contains(&message, &["'prefetch', expected: string"]);
    assert_eq!(settings(&scratch, "a"), before);
    assert_contains(&run_ok(&scratch, &["throttle", "a"]), &["  iops-total  500\n"]);

    client.command(
        "x-weir-set",
        json!({"name": "a", "prefetch": "auto", "prefetch-memory": 4 << 20, "iops-total": 7}),
    );
    assert_eq!(settings(&scratch, "a"), defaults(json!({"window-min": 64 << 10})));
    assert_contains(&run_ok(&scratch, &["throttle", "a"]), &["  iops-total  7\n"]);
}

#[test]
fn groups_have_no_prefetch_settings() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &["--group", "gold"]);
    assert_contains(
        &run_failing(&scratch, &["prefetch", "gold"]),
        &["gold: is a group", "name one of its disks"],
    );
    assert_contains(&run_failing(&scratch, &["prefetch", "c"]), &["c: no disk and no group has this name"]);
    let mut client = Qmp::negotiated(&scratch.socket("qmp"));
    let (_, message) =
        client.command_error("x-weir-set", json!({"name": "gold", "prefetch": "on", "iops-total": 5}));
    assert_contains(&message, &["group gold: prefetch is a setting of its disks"]);
    assert_contains(&run_ok(&scratch, &["throttle", "gold"]), &["no own limits"]);
}

#[test]
fn status_shows_prefetching_disks() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &["--prefetch", "on"]);
    run_ok(&scratch, &["prefetch", "b", "off"]);
    let shown = run_ok(&scratch, &["status", "--all", "--interval", "0"]);
    assert_contains(&shown, &["DISK  PREFETCH  HIT RATE  ACCURACY", "\na     on "]);
    assert!(!shown.contains("\nb     off"), "{shown}");
    let status = status(&scratch, "0");
    let a = find(&status, "disks", "a");
    assert_eq!(a["prefetch"], defaults(json!({"mode": "on"})));
    let figures = a["read-ahead"].as_object().expect("an object");
    for figure in ["hits", "partial-hits", "misses", "skipped", "waited", "wasted-bytes", "memory", "streams"]
    {
        assert!(figures[figure].is_u64(), "{figure}: {figures:?}");
    }
    let shown = run_ok(&scratch, &["prefetch", "b"]);
    assert_contains(
        &shown,
        &["disk b\n  prefetch                  off\n", "  prefetch-memory           4M\n", "\n  hit rate "],
    );
    run_ok(&scratch, &["prefetch", "b", "auto"]);
    assert_contains(&run_ok(&scratch, &["status", "--all", "--interval", "0"]), &["\nb     auto "]);
}

#[test]
fn added_disks_use_their_prefetch_settings() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &[]);
    let mut client = Qmp::negotiated(&scratch.socket("qmp"));
    let memory = |name: &str| json!({"driver": "x-weir-memory", "node-name": name, "size": 1 << 20});
    client.command("blockdev-add", memory("plain"));
    assert_eq!(settings(&scratch, "plain"), defaults(json!({})));
    let mut node = memory("told");
    node["x-weir-prefetch"] = json!("on");
    node["x-weir-prefetch-memory"] = json!(1 << 20);
    client.command("blockdev-add", node);
    let expect = defaults(json!({"mode": "on", "memory": 1 << 20}));
    assert_eq!(settings(&scratch, "told"), expect);

    // Under a new node the disk keeps its settings, except those that the node sets.
    let over = json!({"driver": "raw", "node-name": "over", "file": "told", "x-weir-prefetch-streams": 3});
    client.command("blockdev-add", over);
    let expect = defaults(json!({"mode": "on", "memory": 1 << 20, "streams": 3}));
    assert_eq!(settings(&scratch, "over"), expect);
    client.command("blockdev-del", json!({"node-name": "over"}));
    assert_eq!(settings(&scratch, "told"), expect);

    for (wrong, expected) in [
        (json!({"x-weir-prefetch": "yes"}), "'x-weir-prefetch' does not accept value 'yes'"),
        (
            json!({"x-weir-prefetch-memory": 1}),
            "'x-weir-prefetch-memory' (1) is out of range; it is from 262144",
        ),
        (json!({"x-weir-prefetch-window-max": 4096}), "prefetch-window-min (131072) is above"),
    ] {
        let mut arguments = memory("wrong");
        arguments.as_object_mut().expect("an object").extend(wrong.as_object().expect("an object").clone());
        let (_, message) = client.command_error("blockdev-add", arguments);
        assert_contains(&message, &[expected]);
    }
    assert_contains(
        &run_failing(&scratch, &["prefetch", "wrong"]),
        &["wrong: no disk and no group has this name"],
    );
    let inner =
        json!({"driver": "raw", "node-name": "w", "file": {"driver": "null-co", "x-weir-prefetch": "on"}});
    let (_, message) = client.command_error("blockdev-add", inner);
    assert_contains(&message, &["Parameter 'file.x-weir-prefetch' is unexpected"]);
}

/// Reads the image in steps of 4 KiB, through the daemon and directly.
#[track_caller]
fn read_in_sequence(weir: &Weir, image: &Path) {
    let script = r#"
h.connect_uri(arguments[0])
with open(arguments[1], "rb") as image:
    for offset in range(0, h.get_size(), 4096):
        assert h.pread(4096, offset) == image.read(4096), offset
"#;
    nbdsh(script, [&weir.uri("vm1"), text(image)]);
}

#[test]
fn sequential_reads_hit_the_cache_until_disabled() {
    let scratch = Scratch::new();
    let image = scratch.filled("vm1.raw", 4 * MIB);
    let weir = Serve::new(&scratch)
        .arg(&image)
        .args(["--format", "raw", "--prefetch", "on", "--prefetch-memory", "1M", "--qmp", &socket(&scratch)])
        .start();
    let figures = || run_json(&scratch, &["prefetch", "vm1", "--json"])["read-ahead"].clone();
    let count = |figures: &Value, name: &str| figures[name].as_u64().expect("a counter");
    assert_eq!((figures()["hits"].as_u64(), figures().get("hit-rate")), (Some(0), None));

    read_in_sequence(&weir, &image);
    let after = figures();
    // Each read is counted exactly once.
    let reads = count(&after, "hits") + count(&after, "partial-hits") + count(&after, "misses");
    assert_eq!(reads, 4 * MIB / 4096, "{after:#}");
    assert!(after["hit-rate"].as_f64() > Some(0.8), "{after:#}");
    assert!(after["accuracy"].as_f64() > Some(0.8), "{after:#}");
    assert!(count(&after, "used-bytes") <= count(&after, "read-ahead-bytes"), "{after:#}");
    assert!(count(&after, "memory") <= MIB, "{after:#}");
    let shown = run_ok(&scratch, &["status", "--all", "--interval", "0"]);
    let row = shown.lines().find(|line| line.starts_with("vm1   on ")).expect("the table has the disk");
    assert_eq!(row.matches('%').count(), 2, "{shown}");

    run_ok(&scratch, &["prefetch", "vm1", "off"]);
    let before = figures();
    assert_eq!(count(&before, "memory"), 0, "the memory was not released: {before:#}");
    // While prefetch is off, the counters of the cache do not change.
    read_in_sequence(&weir, &image);
    let after = figures();
    for counter in ["hits", "partial-hits", "read-ahead-bytes"] {
        assert_eq!(count(&after, counter), count(&before, counter), "{counter}: {after:#}");
    }
    run_ok(&scratch, &["prefetch", "vm1", "on"]);
    read_in_sequence(&weir, &image);
    assert!(count(&figures(), "hits") > count(&after, "hits"));
}

//! `weir check-config` and `weir serve --check`: both report what would keep a daemon from serving.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::{FileExt as _, symlink},
};

use serde_json::{Value, json};

use crate::{
    harness::{
        MIB, Scratch, Serve, assert_contains,
        operator::{serve, status},
        text, weir, weir_image,
    },
    reload::with_daemon,
};

#[test]
fn all_errors_of_a_file_are_reported_together() {
    let scratch = Scratch::new();
    let text_of = "[disk.a]\nimage = \"memory:1M\"\ncahce = \"none\"\ngroup = \"gold\"\n\n\
                   [group.gold]\niops-total = \"1K\"\nwatermark = 101\n\n[daemon]\nworkers = 0\n";
    let file = scratch.file("weir.toml", text_of);
    let expect = [
        "3: disk.a.cahce: unknown key (did you mean \"cache\"?)",
        "7: group.gold.iops-total = \"1K\": is not a plain number; a count takes no suffix and no \
         fraction (write 1000)",
        "8: group.gold.watermark = 101: is out of range; a watermark is from 0 to 100 percent",
        "11: daemon.workers = 0: is out of range; it must be from 1 to 256",
    ];
    let expect: String = expect.map(|diagnostic| format!("weir: {}:{diagnostic}\n", text(&file))).concat();
    for check in [&["check-config", text(&file)][..], &["serve", "--check", "--config", text(&file)]] {
        let outcome = weir(check).run();
        assert_eq!((outcome.code(), outcome.stderr()), (1, expect.clone()));
    }
    // A start stops at the first error.
    let first = expect.lines().next().unwrap();
    let outcome = weir(&["serve", "--config", text(&file)]).run();
    assert_eq!((outcome.code(), outcome.stderr().trim_end()), (1, first));
}

#[test]
fn check_finds_image_conflicts_of_a_start() {
    let scratch = Scratch::new();
    scratch.sparse("a.raw", MIB);
    fs::hard_link(scratch.path("a.raw"), scratch.path("hard.raw")).unwrap();
    symlink("a.raw", scratch.path("soft.raw")).unwrap();
    let marked = |name: &str, mark: u8| {
        let image = scratch.path(name);
        weir_image(&["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
        // "incompatible features" of docs/interop/qcow2.rst, the last of its eight bytes.
        let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
        file.write_all_at(&[mark], 79).unwrap();
    };
    marked("corrupt.qcow2", 2);
    marked("dirty.qcow2", 1);
    let over = scratch.path("over.qcow2");
    weir_image(&["create", "-q", "-f", "qcow2", "-b", "a.raw", "-F", "raw", text(&over)]).succeeds();
    let disk = |name: &str, image: &str, more: &str| {
        let format = if image.ends_with("raw") { "raw" } else { "qcow2" };
        format!("[disk.{name}]\nimage = \"{image}\"\nformat = \"{format}\"\n{more}\n")
    };
    let file = scratch.path("weir.toml");
    let write = |disks: &[String]| {
        fs::write(&file, format!("[daemon]\nnbd = \"unix:nbd\"\nqmp = \"none\"\n{}", disks.concat()))
            .unwrap();
    };
    let checks = [&["check-config"][..], &["serve", "--check", "--config"]];
    let a = || disk("a", "a.raw", "");
    for (first, second, why) in [
        (a(), ("hard.raw", ""), "hard.raw: in use by the disk \"a\" (export one disk twice"),
        (a(), ("soft.raw", ""), "soft.raw: in use by the disk \"a\" ("),
        (a(), ("hard.raw", "read-only = true"), "hard.raw: in use by the disk \"a\" ("),
        (a(), ("over.qcow2", ""), "a.raw: in use by the disk \"a\" ("),
        (disk("over", "over.qcow2", ""), ("a.raw", ""), "a.raw: in use by the disk \"over\" ("),
        (a(), ("corrupt.qcow2", ""), "corrupt.qcow2: is marked corrupt (`weir image check --repair`"),
    ] {
        write(&[first, disk("b", second.0, second.1)]);
        let started = Serve::new(&scratch).at_given_addresses().arg("--config").arg(&file).fails();
        let started = started.lines().last().and_then(|line| line.strip_prefix("weir: ")).unwrap_or_default();
        let prefix = format!("{}:9: disk.b.image = \"{}\": ", text(&file), second.0);
        assert_contains(started, &[&prefix, why]);
        for check in checks {
            let outcome = weir(check).arg(&file).run();
            assert_eq!((outcome.code(), outcome.stderr()), (1, format!("weir: {started}\n")));
        }
    }
    // Configs that a start accepts pass the check.
    for disks in [
        [disk("a", "a.raw", "read-only = true"), disk("b", "soft.raw", "read-only = true")],
        [disk("a", "over.qcow2", ""), disk("b", "hard.raw", "read-only = true")],
        [disk("a", "corrupt.qcow2", "read-only = true"), disk("b", "dirty.qcow2", "")],
    ] {
        write(&disks);
        for check in checks {
            weir(check).arg(&file).succeeds();
        }
        Serve::new(&scratch).at_given_addresses().arg("--config").arg(&file).start().stop();
    }
}

#[test]
fn config_in_use_can_be_checked() {
    let scratch = Scratch::new();
    scratch.sparse("a.raw", MIB);
    let socket = |name: &str| format!("unix:{}", text(&scratch.socket(name)));
    let disks = format!(
        "pid-file = \"pid\"\n\
         \n\
         [disk.a]\n\
         image = \"a.raw\"\n\
         format = \"raw\"\n\
         \n\
         [disk.b]\n\
         image = \"memory:1M\"\n\
         export = {{ type = \"vhost-user-blk\", listen = \"{}\" }}\n",
        socket("vm"),
    );
    let file = scratch.file("weir.toml", with_daemon(&scratch, &disks));
    let check = || weir(&["serve", "--check", "--config", text(&file)]);
    let valid = format!("{}: 2 disks, 0 groups, 2 exports: no errors\n", text(&file));
    assert_eq!(check().succeeds(), valid);
    let daemon = serve(&scratch, &file);
    assert_eq!(weir(&["check-config", text(&file)]).succeeds(), valid);
    // A check of a start finds the locks of the running daemon.
    let outcome = check().run();
    assert_eq!(outcome.code(), 1);
    let stderr = outcome.stderr();
    let pid = daemon.pid();
    let mut lines = stderr.lines();
    for (line, key, why) in [
        (8, "disk.a.image", format!("a.raw: locked for writing by another process (pid {pid}, weir)")),
        (2, "daemon.qmp", "in use: another process listens there".to_owned()),
        (3, "daemon.nbd", "in use: another process listens there".to_owned()),
        (13, "disk.b.export.listen", "in use: another process listens there".to_owned()),
        (5, "daemon.pid-file", format!("is locked by process {pid} (stop it first")),
    ] {
        let prefix = format!("weir: {}:{line}: {key} = \"", file.display());
        assert_contains(lines.next().unwrap_or(&stderr), &[&prefix, &why]);
    }
    assert_eq!(lines.next(), None, "{stderr}");
    // The check took no locks and made no connections, and the daemon continues.
    assert_eq!(status(&scratch, "0")["disks"][0]["connections"], 0);
    assert!(!daemon.log_text().contains("WARN"), "{}", daemon.log_text());
    daemon.stop();
    check().succeeds();
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    let check = || weir(&["serve", "--check", "memory:1M", "--nbd", &address]);
    assert_contains(&check().fails(), &[&format!("weir: --nbd {address}: {address}: the port is in use")]);
    drop(port);
    check().succeeds();
}

#[test]
fn check_counts_warnings_of_a_start() {
    let scratch = Scratch::new();
    // More memory than any host has.
    let file = scratch.file("weir.toml", with_daemon(&scratch, "\n[disk.a]\nimage = \"memory:8T\"\n"));
    let outcome = weir(&["check-config", text(&file)]).run();
    assert_contains(&outcome.stderr(), &["disks in memory have"]);
    let sum = format!("{}: 1 disk, 0 groups, 1 export: it would start, with 1 warning\n", text(&file));
    assert_eq!(outcome.succeeded(), sum);
}

#[test]
fn handover_without_vhost_user_export_is_reported() {
    let scratch = Scratch::new();
    scratch.sparse("a.raw", MIB);
    let disk = "\n[disk.a]\nimage = \"a.raw\"\nformat = \"raw\"\nhandover = true\n";
    let file = scratch.file("weir.toml", with_daemon(&scratch, disk));
    let outcome = weir(&["check-config", text(&file)]).run();
    assert_contains(&outcome.stderr(), &["handover", "the disk has no vhost-user-blk export (add one"]);
    let export_line = "export = [{ type = \"vhost-user-blk\", listen = \"unix:vm\" }]\n";
    let file = scratch.file("weir.toml", format!("[daemon]\nqmp = \"unix:q\"\n{disk}{export_line}"));
    assert_contains(&weir(&["check-config", text(&file)]).succeeds(), &["1 export: no errors\n"]);
}

#[test]
fn all_host_errors_are_reported() {
    let scratch = Scratch::new();
    scratch.file("text", "hi");
    let disks = "
[disk.a]
image = \"none.raw\"
export = [{ type = \"nbd\", listen = \"unix:text\" }]

[disk.b]
image = \"memory:1M\"
export = [{ type = \"vhost-user-blk\", listen = \"unix:nowhere/b.sock\" }]

[disk.c]
image = \"memory:1M\"
l2-cache-size = \"1M\"
";
    let daemon = "pid-file = \"nowhere/pid\"\nsocket-owner = \"no-such-user\"\n";
    let file = scratch.file("weir.toml", with_daemon(&scratch, &format!("{daemon}{disks}")));
    let outcome = weir(&["check-config", text(&file)]).run();
    assert_eq!(outcome.code(), 1);
    assert_contains(
        &outcome.stderr(),
        &[
            "weir.toml:9: disk.a.image = \"none.raw\"",
            "no such file (create it first",
            "weir.toml:18: disk.c.l2-cache-size = \"1M\": is for qcow2 images",
            "text: a file that is not a socket exists there",
            "nowhere does not exist (create it)",
            "weir.toml:6: daemon.socket-owner = \"no-such-user\": socket-owner: there is no user",
            "weir.toml:14: disk.b.export[0].listen = \"unix:nowhere/b.sock\": unix:",
            "weir.toml:5: daemon.pid-file = \"nowhere/pid\": pid file ",
        ],
    );
    nix::unistd::mkfifo(&scratch.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (daemon, disk, expect) in [
        ("user = \"no-such-user\"", "", "daemon.user = \"no-such-user\": user: there is no user"),
        ("image-root = \"no\"", "", "daemon.image-root = \"no\": image root "),
        ("qmp = \"unix:no/q\"", "", "daemon.qmp = \"unix:no/q\": unix:"),
        ("nbd = \"unix:no/n\"", "", "daemon.nbd = \"unix:no/n\": unix:"),
        ("metrics = \"unix:no/m\"", "", "daemon.metrics = \"unix:no/m\": unix:"),
        ("http = \"unix:no/h\"", "", "daemon.http = \"unix:no/h\": unix:"),
        (
            "http-token-file = \"no\"\nhttp = \"unix:h\"",
            "",
            "daemon.http-token-file = \"no\": http-token-file ",
        ),
        ("on-event = \"/no/program\"", "", "daemon.on-event = \"/no/program\": "),
        ("tls-certificates = \"no\"\ntls = \"on\"", "", "daemon.tls-certificates = \"no\": TLS: "),
        ("tls-psk = \"no\"\ntls = \"required\"", "", "daemon.tls-psk = \"no\": TLS: "),
        ("record = { directory = \"no\" }", "", "daemon.record.directory = \"no\": record: "),
        ("", "export = { type = \"fuse\", file = \"no\" }", "disk.a.export.file = \"no\": "),
        ("", "export = { type = \"fuse\", file = \".\" }", "disk.a.export.file = \".\": "),
        ("log-file = \".\"", "", "daemon.log-file = \".\": log-file "),
        ("log-file = \"no/log\"", "", "daemon.log-file = \"no/log\": log-file "),
        ("pid-file = \".\"", "", "daemon.pid-file = \".\": pid file "),
        ("pid-file = \"pipe\"", "", "pipe: is not a regular file (choose another path)"),
        (
            "",
            "export = [{ type = \"nbd\", listen = \"unix:no/e\" }]",
            "export[0].listen = \"unix:no/e\": unix:",
        ),
    ] {
        let text = format!("[daemon]\n{daemon}\n[disk.a]\nimage = \"memory:1M\"\n{disk}\n");
        let file = scratch.file("lacks.toml", text);
        let outcome = weir(&["check-config", file.to_str().unwrap()]).run();
        assert_eq!(outcome.code(), 1);
        let line = if daemon.is_empty() { 5 } else { 2 };
        assert_contains(&outcome.stderr(), &[&format!("weir: {}:{line}: ", file.display()), expect]);
    }
    let file = scratch.file("wrong.toml", "[disk.a]\nimage = \"memory:1M\"\nchache = \"none\"\n");
    let outcome = weir(&["check-config", text(&file)]).run();
    assert_eq!(outcome.code(), 1);
    assert_contains(
        &outcome.stderr(),
        &["wrong.toml:3: disk.a.chache: unknown key (did you mean \"cache\"?)"],
    );
    assert_eq!(weir(&["check-config"]).run().code(), 2);
    assert_eq!(weir(&["serve", "--check"]).run().code(), 2);
}

#[test]
fn check_reports_two_servers_at_one_address() {
    let scratch = Scratch::new();
    symlink(scratch.path(""), scratch.path("link")).unwrap();
    for (first_setting, second_setting) in [
        ("nbd = \"127.0.0.1:10977\"", "http = \"127.0.0.1:10977\""),
        ("nbd = \"127.0.0.1:10977\"", "metrics = \"0.0.0.0:10977\""),
        ("nbd = \"unix:s\"", "qmp = \"unix:link/s\""),
        ("metrics = \"unix:s\"", "http = \"unix:link/s\""),
    ] {
        let text = format!("[daemon]\n{first_setting}\n{second_setting}\n[disk.a]\nimage = \"memory:1M\"\n");
        let file = scratch.file("weir.toml", text);
        let outcome = weir(&["check-config"]).arg(&file).run();
        assert_eq!(outcome.code(), 1, "{first_setting} {second_setting}");
        let stderr = outcome.stderr();
        assert_contains(&stderr, &["this daemon also listens at", "give each server its own address"]);
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    // A named pipe causes a warning only: a check cannot know whether it will have a reader.
    nix::unistd::mkfifo(&scratch.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let text = "[daemon]\nlog-file = \"pipe\"\n[disk.a]\nimage = \"memory:1M\"\n";
    let outcome = weir(&["check-config"]).arg(scratch.file("weir.toml", text)).run();
    assert_contains(&outcome.stderr(), &["is a named pipe"]);
    assert_contains(&outcome.succeeded(), &["it would start, with 1 warning"]);
}

#[test]
fn check_prints_diagnostics_as_json() {
    let scratch = Scratch::new();
    let check = |text: &str| {
        let file = scratch.file("weir.toml", text);
        let outcome = weir(&["check-config", "--json", file.to_str().unwrap()]).run();
        let found: Value = serde_json::from_str(&outcome.stdout()).expect("JSON");
        (outcome.code(), found, file.display().to_string())
    };
    assert_eq!(check("[disk.a]\nimage = \"memory:1M\"\n").1, json!([]));
    // Errors of the file come before problems of the host.
    let (code, found, file) = check("[disk.a]\nimage = \"memory:1M\"\nchache = \"none\"\n");
    let message = "unknown key (did you mean \"cache\"?)";
    let expect = json!([
        { "severity": "error", "file": file, "line": 3, "key": "disk.a.chache", "message": message }
    ]);
    assert_eq!((code, &found), (1, &expect));
    let (code, found, file) = check("[group.g]\n[disk.a]\nimage = \"none.raw\"\nformat = \"raw\"\n");
    assert_eq!((code, found.as_array().unwrap().len()), (1, 2), "{found}");
    let location = |found: &Value| ["severity", "file", "line", "key"].map(|key| found[key].clone());
    assert_eq!(location(&found[0]), [json!("error"), json!(file), json!(3), json!("disk.a.image")]);
    assert_contains(found[0]["message"].as_str().unwrap(), &["no such file"]);
    assert!(!found[0]["message"].as_str().unwrap().contains("disk.a.image"), "{found}");
    assert_eq!(location(&found[1]), [json!("warning"), json!(file), Value::Null, Value::Null]);
    let (code, found, _) = check("[group.g]\n[disk.a]\nimage = \"memory:1M\"\n");
    assert_eq!((code, found.as_array().unwrap().len()), (0, 1), "{found}");
    assert_contains(found[0]["message"].as_str().unwrap(), &["no disk is in this group"]);
}

//! `weir disk` and `weir group`: adding and removing disks and groups at run time, with and without
//! `--save` to the config file.

use std::fs;

use crate::{
    harness::{
        MIB, Qmp, RawNbdClient, Scratch, Serve, TestClient, assert_contains, create_encrypted,
        operator::{find, run_failing, run_json, run_misused, run_ok, serve, socket, status},
        pattern, qemu_img, qemu_io, text,
    },
    vhost_user::front_end,
};

const CONFIG: &str = "
# pays
[group.gold]
iops-total = 1000

[disk.a] # the first
image = \"memory:1M\"

# the end
";

/// This process, in the format in which weir names clients.
fn client_name_of_this_process() -> String {
    let name = fs::read_to_string("/proc/self/comm").unwrap();
    format!("{} ({})", name.trim_end(), std::process::id())
}

fn config(scratch: &Scratch) -> String {
    let nbd = text(&scratch.socket("nbd")).to_owned();
    let (qmp, root) = (socket(scratch), scratch.path(""));
    // The sandbox must allow images that are added later.
    let root = text(&root);
    format!("[daemon]\nqmp = \"{qmp}\"\nnbd = \"unix:{nbd}\"\nimage-root = \"{root}\"\n{CONFIG}")
}

#[test]
fn added_disk_is_served_saved_and_removed() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let image = scratch.sparse("b.raw", 2 * MIB);
    let stdout =
        run_ok(&scratch, &["group", "add", "silver", "--group", "gold", "--bps-total", "5M", "--save"]);
    assert_eq!(stdout, format!("group silver: added\nsilver: saved in {}\n", text(&file)));
    let options =
        ["-f", "raw", "--cache", "none", "--group", "silver", "--iops-total", "70", "--read-only", "--save"];
    run_ok(&scratch, &[&["disk", "add", "b", text(&image)][..], &options].concat());
    let uri = format!("nbd+unix:///b?socket={}", text(&scratch.socket("nbd")));
    assert_eq!(TestClient::new("nbdinfo").args(["--size", &uri]).succeeds(), format!("{}\n", 2 * MIB));
    let now = status(&scratch, "0");
    let disk = find(&now, "disks", "b");
    assert_eq!(
        (&disk["group"], &disk["limits"]["iops-total"], &disk["cache"]),
        (&"silver".into(), &70.into(), &"none".into())
    );
    assert_eq!(
        (&disk["read-only"], &find(&now, "groups", "silver")["group"]),
        (&true.into(), &"gold".into())
    );
    let saved = fs::read_to_string(&file).unwrap();
    let group = "[group.silver]\ngroup = \"gold\"\nbps-total = \"5M\"\n";
    let disk = format!(
        "[disk.b]\n\
         image = \"{}\"\n\
         format = \"raw\"\n\
         cache = \"none\"\n\
         read-only = true\n\
         group = \"silver\"\n\
         iops-total = 70\n",
        text(&image)
    );
    let expect = before
        .replace("\n[disk.a]", &format!("\n{group}\n[disk.a]"))
        .replace("\n# the end", &format!("\n{disk}\n# the end"));
    assert_eq!(saved, expect);
    // The saved file matches the running state.
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    let (client, _) = RawNbdClient::negotiated(&scratch.socket("nbd"), "b");
    let busy = run_failing(&scratch, &["disk", "remove", "b", "--save"]);
    let used_by = format!(" of {} (disconnect it first)", client_name_of_this_process());
    assert_contains(&busy, &["export b of disk b: in use: client ", &used_by]);
    assert_eq!(fs::read_to_string(&file).unwrap(), saved);
    drop(client);
    assert_contains(&run_failing(&scratch, &["group", "remove", "silver"]), &["'silver' is in use"]);
    let removed = run_json(&scratch, &["disk", "remove", "b", "--save", "--json"]);
    assert_eq!(
        removed,
        serde_json::json!({ "kind": "disk", "name": "b", "change": "removed", "saved": text(&file) })
    );
    run_ok(&scratch, &["group", "remove", "silver", "--save"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    // A disk or group that is not in the file is removed nevertheless.
    for (kind, more) in [("disk", &["memory:1M"][..]), ("group", &[])] {
        run_ok(&scratch, &[&[kind, "add", "late"], more].concat());
        let not_saved = format!("late: nothing to change in {}, which has no [{kind}.late]\n", text(&file));
        let stdout = run_ok(&scratch, &[kind, "remove", "late", "--save"]);
        assert_eq!(stdout, format!("{kind} late: removed\n{not_saved}"));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    weir.stop();
}

/// ID, address and read-only flag of each export of a disk.
fn exports(scratch: &Scratch, disk: &str) -> Vec<(String, String, bool)> {
    let now = status(scratch, "0");
    let of_disk = now["exports"].as_array().unwrap().iter().filter(|export| export["disk"] == disk);
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    of_disk.map(|entry| (text(&entry["id"]), text(&entry["address"]), entry["read-only"] == true)).collect()
}

#[test]
fn added_disk_uses_default_or_named_addresses() {
    let scratch = Scratch::new();
    let [first_address, second_address] =
        ["one", "two"].map(|name| format!("unix:{}", text(&scratch.socket(name))));
    let file = scratch.file("weir.toml", format!("[daemon]\nqmp = \"{}\"\n{CONFIG}", socket(&scratch)));
    let second = format!("{second_address},read-only");
    let start = || {
        let weir = Serve::new(&scratch).at_given_addresses().arg("--config").arg(&file);
        weir.args(["--nbd", &first_address, "--nbd", &second]).start()
    };
    let weir = start();
    let uri = |disk: &str, at: &str| format!("nbd+unix:///{disk}?socket={}", at.trim_start_matches("unix:"));
    let added = run_json(&scratch, &["disk", "add", "b", "memory:2M", "--save", "--json"]);
    let expect = serde_json::json!({
        "kind": "disk", "name": "b", "change": "added", "saved": text(&file), "uris": [uri("b", &first_address), uri("b", &second_address)],
    });
    assert_eq!(added, expect);
    let stdout = run_ok(&scratch, &["disk", "add", "c", "memory:2M", "--nbd", &second, "--save"]);
    assert_eq!(
        stdout,
        format!("disk c: added, at {}\nc: saved in {}\n", uri("c", &second_address), text(&file))
    );
    let of_c = format!(
        "[disk.c]\n\
         image = \"memory:2097152\"\n\
         export = [{{ type = \"nbd\", listen = \"{second_address}\", read-only = true }}]\n"
    );
    assert_contains(
        &fs::read_to_string(&file).unwrap(),
        &["[disk.b]\nimage = \"memory:2097152\"\n\n", &of_c],
    );
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    let both = [
        ("b".to_owned(), first_address.clone(), false),
        (format!("b@{second_address}"), second_address.clone(), true),
    ];
    let check = || {
        assert_eq!(exports(&scratch, "b"), both);
        assert_eq!(exports(&scratch, "c"), [("c".to_owned(), second_address.clone(), true)]);
    };
    check();
    weir.stop();
    let _weir = start();
    check();
}

#[test]
fn address_of_another_disk_must_be_named() {
    let scratch = Scratch::new();
    let [own_address, other_address] =
        ["own", "machine"].map(|name| format!("unix:{}", text(&scratch.socket(name))));
    let before = format!(
        "[daemon]\n\
         qmp = \"{}\"\n\
         \n\
         [disk.vm1]\n\
         image = \"memory:1M\"\n\
         export = [{{ type = \"vhost-user-blk\", listen = \"{other_address}\" }}, {{ type = \"nbd\", \
         listen = \"{own_address}\", read-only = true }}]\n",
        socket(&scratch),
    );
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let add = ["disk", "add", "vm2", "memory:1M", "--save"];
    let expect = format!(
        "weir: vm2: the daemon has no default NBD address (choose an export: --nbd {own_address}, or \
         --vhost-user-blk unix:PATH)\n"
    );
    assert_eq!(run_failing(&scratch, &add), expect);
    let unused = format!("unix:{}", text(&scratch.socket("nowhere")));
    let expect = format!(
        "weir: --nbd {unused}: the daemon does not listen there, but at {own_address} (add a new address \
         in the config file and run `weir reload`)\n"
    );
    assert_eq!(run_failing(&scratch, &[&add[..], &["--nbd", &unused]].concat()), expect);
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    // Clients of QMP may add a disk and export it later; the export needs an address as well.
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let keys = serde_json::json!({ "image": "memory:1M" });
    let new_disk = serde_json::json!({ "name": "later", "keys": keys, "exports": [] });
    let done = qmp.command("x-weir-add-disk", new_disk);
    assert_eq!(done, serde_json::json!({ "uris": [] }));
    let mut export = serde_json::json!({ "type": "nbd", "id": "later", "node-name": "later" });
    assert_contains(
        &qmp.command_error("block-export-add", export.clone()).1,
        &["'x-weir-listen' is missing", &own_address],
    );
    export["x-weir-listen"] = own_address.clone().into();
    qmp.command("block-export-add", export);
    drop(qmp);
    run_ok(&scratch, &["disk", "remove", "later"]);
    let named = format!("{own_address},read-only");
    let stdout = run_ok(&scratch, &[&add[..], &["--nbd", &named]].concat());
    let uri = format!("nbd+unix:///vm2?socket={}", text(&scratch.socket("own")));
    assert_eq!(stdout, format!("disk vm2: added, at {uri}\nvm2: saved in {}\n", text(&file)));
    let read_only = [("vm2".to_owned(), own_address.clone(), true)];
    assert_eq!(exports(&scratch, "vm2"), read_only);
    TestClient::new("nbdinfo").args(["--is", "read-only", &uri]).succeeds();
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    weir.stop();
    let weir = serve(&scratch, &file);
    assert_eq!(exports(&scratch, "vm2"), read_only);
    // A reload may add a default address of the daemon.
    let all = format!("unix:{}", text(&scratch.socket("all")));
    let with_own = fs::read_to_string(&file).unwrap().replacen("\n\n", &format!("\nnbd = \"{all}\"\n\n"), 1);
    fs::write(&file, with_own + "\n[disk.vm3]\nimage = \"memory:1M\"\n").unwrap();
    run_ok(&scratch, &["reload"]);
    run_ok(&scratch, &["disk", "add", "vm4", "memory:1M"]);
    assert_eq!(exports(&scratch, "vm4"), [("vm4".to_owned(), all, false)]);
    weir.stop();
}

#[test]
fn addresses_are_spelled_as_for_weir_serve() {
    let scratch = Scratch::new();
    for directory in ["etc", "run 1"] {
        fs::create_dir(scratch.path(directory)).unwrap();
    }
    let config = format!(
        "[daemon]\n\
         qmp = \"{}\"\n\
         \n\
         [disk.a]\n\
         image = \"memory:1M\"\n\
         export = {{ type = \"nbd\", listen = \"unix:../run 1/x.sock\" }}\n",
        socket(&scratch),
    );
    let file = scratch.file("etc/weir.toml", &config);
    let weir = serve(&scratch, &file);
    let absolute = format!("unix:{}", text(&scratch.path("run 1/x.sock")));
    let add = |name: &str, inside: &str, address: &str| {
        let client = crate::harness::weir(&["disk", "add", name, "memory:1M", "--save", "--nbd", address]);
        client.args(["--qmp", &socket(&scratch)]).inside(&scratch.path(inside)).succeeds();
        assert_eq!(RawNbdClient::negotiated(&scratch.path("run 1/x.sock"), name).1, MIB);
        assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    };
    add("b", "run 1", "unix:x.sock");
    add("c", "etc", "unix:../run 1/x.sock");
    add("d", "", &absolute);
    let shown = format!("unix:{}", text(&scratch.path("etc/../run 1/x.sock")));
    assert_eq!(exports(&scratch, "d"), [("d".to_owned(), shown, false)]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let export = serde_json::json!({ "type": "nbd", "id": "e", "node-name": "a", "name": "e", "x-weir-listen": absolute });
    qmp.command("block-export-add", export);
    weir.stop();
    serve(&scratch, &file).stop();
}

#[test]
fn failed_add_changes_nothing() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let image = scratch.sparse("b.raw", MIB);
    let image = text(&image);
    let unused = format!("unix:{}/vm", text(&scratch.path("nowhere")));
    let nbd = format!("unix:{}", text(&scratch.socket("nbd")));
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    for (arguments, expect) in [
        (&["disk", "add", "a", image, "-f", "raw"][..], "a: a disk or a group has this name already (choose"),
        (&["disk", "add", "..", image, "-f", "raw"], "disk.\"..\": the name has a special meaning in paths"),
        (&["disk", "add", "b", "none.raw", "-f", "raw"], "none.raw"),
        (&["disk", "add", "b", "none.raw"], "none.raw: lies outside of the image root"),
        (&["disk", "add", "b", "/"], "/: the sandbox allows images only in "),
        // The second step of the addition fails, and then the third.
        (&["disk", "add", "b", image, "-f", "raw", "--group", "absent"], "there is no group \"absent\""),
        (
            &["disk", "add", "b", image, "-f", "raw", "--nbd", "unix:/absent"],
            "--nbd unix:/absent: the daemon does not listen there, but at unix:",
        ),
        (
            &["disk", "add", "b", image, "-f", "raw", "--snapshot", "s"],
            "is for qcow2 images, and this one is raw",
        ),
        (&["disk", "add", "b", image, "-f", "raw", "--vhost-user-blk", &unused], "nowhere/vm"),
        // The last step fails, after one export was added.
        (&["disk", "add", "b", image, "-f", "raw", "--nbd", &nbd, "--vhost-user-blk", &unused], "nowhere/vm"),
        (&["disk", "add", "b", image, "--options", "offset=2M"], "choose another offset or size"),
        (&["disk", "add", "a", image, "-f", "raw", "--save"], "already has a [disk.a]"),
        (&["disk", "remove", "b"], "b: no disk has this name"),
        (&["group", "add", "gold"], "gold"),
        (&["group", "remove", "a"], "a: no group of this daemon has this name"),
    ] {
        assert_contains(&run_failing(&scratch, arguments), &[expect]);
        let now = status(&scratch, "0");
        let names = |list: &str| now[list].as_array().unwrap().len();
        assert_eq!((names("disks"), names("groups"), names("exports")), (1, 1, 1), "{arguments:?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), before);
    }
    for command_line in [["--weight", "0"], ["--iops-total-max", "5"]] {
        let stderr = run_misused(&scratch, &[&["group", "add", "g"][..], &command_line].concat());
        assert_contains(&stderr, &[&command_line.join(" ")]);
    }
    // The failures change nothing and send no events.
    let events = qmp.command("x-weir-query-events", serde_json::json!({}));
    assert_eq!(events, serde_json::json!([]));
    for event in ["X_WEIR_EVENT", "X_WEIR_SETTINGS_CHANGED", "BLOCK_EXPORT_DELETED"] {
        assert_eq!(qmp.count_events(event), 0, "{event}");
    }
    assert!(!weir.log_text().contains("an export was added"));
    // A successful command sends events. The format is probed, as for a disk of the config file.
    run_ok(&scratch, &["disk", "add", "b", image, "--iops-total", "70"]);
    let events = qmp.command("x-weir-query-events", serde_json::json!({}));
    let kinds: Vec<_> = events.as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["disk_added"]);
    assert_eq!(events[0]["data"]["by"]["kind"], "qmp");
    weir.stop();
}

#[test]
fn error_names_the_disk_that_uses_the_image() {
    let scratch = Scratch::new();
    let file = scratch.file("weir.toml", config(&scratch));
    let weir = serve(&scratch, &file);
    let (image, link, over) =
        (scratch.sparse("b.raw", MIB), scratch.path("link.raw"), scratch.path("over.qcow2"));
    std::os::unix::fs::symlink("b.raw", &link).unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", "-b", text(&image), "-F", "raw", text(&over)]).succeeds();
    run_ok(&scratch, &["disk", "add", "b", text(&image), "-f", "raw"]);
    let remedy = "in use by the disk \"b\" (export one disk twice, or make both read-only)";
    for (path, format, expect) in [
        (&image, "raw", format!("{}: {remedy}", text(&image))),
        (&link, "raw", format!("{}: {remedy}", text(&link))),
        (&over, "qcow2", format!("{}: its backing file {}: {remedy}", text(&over), text(&image))),
    ] {
        assert_contains(&run_failing(&scratch, &["disk", "add", "c", text(path), "-f", format]), &[&expect]);
    }
    // The error of a reload names the disk that uses the image as well.
    let disk = format!("\n[disk.c]\nimage = \"{}\"\nformat = \"raw\"\n", text(&link));
    fs::write(&file, config(&scratch) + &disk).unwrap();
    assert_contains(&run_failing(&scratch, &["reload"]), &["disk.c.image", remedy]);
    weir.stop();
}

#[test]
fn added_disk_accepts_image_options() {
    let scratch = Scratch::new();
    let file = scratch.file("weir.toml", config(&scratch));
    let _weir = serve(&scratch, &file);
    let nbd = scratch.socket("nbd");
    let raw = scratch.filled("b.raw", MIB);
    let qcow2 = scratch.path("c.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&qcow2), "1M"]).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 1 0 512"], text(&qcow2));
    qemu_img(["snapshot", "-c", "one", text(&qcow2)]).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 2 0 512"], text(&qcow2));
    let locked = scratch.path("d.qcow2");
    create_encrypted(&locked);
    let key = scratch.file("key", "abc");
    run_ok(&scratch, &["disk", "add", "part", text(&raw), "--options", "offset=512,size=1K"]);
    run_ok(
        &scratch,
        &["disk", "add", "old", text(&qcow2), "--snapshot", "one", "--cache-clean-interval", "5"],
    );
    // With a wrong passphrase nothing is added, not even the secret.
    let wrong = scratch.file("wrong", "cba");
    run_failing(&scratch, &["disk", "add", "locked", text(&locked), "--secret-file", text(&wrong)]);
    run_ok(&scratch, &["disk", "add", "locked", text(&locked), "--secret-file", text(&key)]);
    let (mut part, _) = RawNbdClient::negotiated(&nbd, "part");
    assert_eq!(part.read(0, 1024).as_deref(), Ok(&pattern(1536)[512..]));
    assert!(part.read(1024, 1).is_err(), "the part ends at 1024");
    let (mut old, _) = RawNbdClient::negotiated(&nbd, "old");
    assert_eq!(old.read(0, 512).as_deref(), Ok(&[1; 512][..]));
    RawNbdClient::negotiated(&nbd, "locked").0.read(0, 512).expect("it is open");
}

#[test]
fn disk_with_vhost_user_export_is_added_saved_and_removed() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let (image, socket) = (scratch.sparse("c.raw", 2 * MIB), scratch.socket("machine"));
    let listen_option = format!("unix:{},queues=2,discard=off", text(&socket));
    let add = [
        "disk",
        "add",
        "c",
        text(&image),
        "-f",
        "raw",
        "--iops-total",
        "70",
        "--vhost-user-blk",
        &listen_option,
    ];
    let unused = run_misused(&scratch, &[&add[..], &["--allow", "10.0.0.0/8"]].concat());
    assert_contains(&unused, &["--allow: is not used, because the disk is not exported over NBD"]);
    run_ok(&scratch, &[&add[..], &["--save"]].concat());
    let now = status(&scratch, "0");
    let of_c = |status: &serde_json::Value| {
        let exports = status["exports"].as_array().unwrap().iter();
        exports.filter(|export| export["disk"] == "c").cloned().collect::<Vec<_>>()
    };
    let [export] = &*of_c(&now) else { panic!("{now:#}") };
    assert_eq!((&export["id"], &export["type"]), (&"c".into(), &"vhost-user-blk".into()));
    assert_eq!(
        (&export["address"], &export["read-only"]),
        (&format!("unix:{}", text(&socket)).into(), &false.into())
    );
    drop(front_end(&socket));
    let saved = fs::read_to_string(&file).unwrap();
    let written = format!(
        "iops-total = 70\n\
         export = [{{ type = \"vhost-user-blk\", listen = \"unix:{}\", queues = 2, discard = false \
         }}]\n",
        text(&socket)
    );
    assert_contains(&saved, &[&written]);
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    run_ok(&scratch, &["disk", "remove", "c", "--save"]);
    assert!(!socket.exists());
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    // Combined with NBD: if one export fails, the whole disk is removed.
    run_ok(&scratch, &[&add[..], &["--nbd", &format!("unix:{}", text(&scratch.socket("nbd")))]].concat());
    let ids: Vec<_> = of_c(&status(&scratch, "0")).iter().map(|export| export["id"].clone()).collect();
    assert_eq!(ids, ["c".to_owned(), format!("c@unix:{}", text(&socket))]);
    // An ID of this form may be used again.
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    qmp.command("block-export-del", serde_json::json!({ "id": ids[1] }));
    qmp.event("BLOCK_EXPORT_DELETED");
    let addr = serde_json::json!({ "type": "unix", "path": text(&socket) });
    let export_arguments =
        serde_json::json!({ "type": "vhost-user-blk", "id": ids[1], "node-name": "c", "addr": addr });
    qmp.command("block-export-add", export_arguments);
    let other = serde_json::json!({ "type": "vhost-user-blk", "id": "d@x", "node-name": "c", "addr": addr });
    assert_eq!(qmp.command_error("block-export-add", other).1, "Invalid block export id");
    drop(qmp);
    let second = ["disk", "add", "d", "memory:1M", "--vhost-user-blk", &listen_option];
    assert_contains(&run_failing(&scratch, &second), &["the export c@unix:", "uses this path"]);
    assert!(status(&scratch, "0")["disks"].as_array().unwrap().iter().all(|disk| disk["name"] != "d"));
    run_ok(&scratch, &["disk", "remove", "c"]);
    // Any number of sockets, as for `weir serve`.
    let sockets = ["one", "two"].map(|name| scratch.socket(name));
    let [first_address, second_address] =
        [&sockets[0], &sockets[1]].map(|socket| format!("unix:{}", text(socket)));
    let both = ["--vhost-user-blk", &first_address, "--vhost-user-blk", &second_address];
    run_ok(&scratch, &[&["disk", "add", "e", "memory:1M"][..], &both].concat());
    sockets.iter().for_each(|socket| drop(front_end(socket)));
    // Sockets can be passed to a daemon only when it starts.
    let passed = run_failing(&scratch, &["disk", "add", "f", "memory:1M", "--vhost-user-blk", "fd:f"]);
    assert_contains(&passed, &["fd:f: no such socket was passed", "write unix:PATH, or restart weir"]);
    let passed = run_misused(&scratch, &["disk", "add", "f", "memory:1M", "--nbd", "fd:f"]);
    assert_contains(&passed, &["give its address", "unix:PATH or HOST:PORT"]);
    weir.stop();
}

#[test]
fn group_changes_are_printed_as_json() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &scratch.file("weir.toml", config(&scratch)));
    let report = |change: &str| serde_json::json!({ "kind": "group", "name": "json", "change": change });
    let added = run_json(&scratch, &["group", "add", "json", "--iops-total", "7", "--json"]);
    assert_eq!(added, report("added"));
    assert_eq!(run_json(&scratch, &["group", "remove", "json", "--json"]), report("removed"));
    weir.stop();
}

#[test]
fn failed_detach_is_printed_as_json() {
    let scratch = Scratch::new();
    let outcome = crate::harness::weir(&["detach", "--json", "nothing-of-this-name"])
        .env("WEIR_QMP", socket(&scratch))
        .run();
    assert_eq!(outcome.code(), 1, "{}", outcome.stderr());
    let report: serde_json::Value = serde_json::from_str(&outcome.stdout()).expect("JSON");
    assert_eq!((&report[0]["name"], &report[0]["detached"]), (&"nothing-of-this-name".into(), &false.into()));
    assert_contains(report[0]["error"].as_str().unwrap(), &["not attached (`weir attach --list`"]);
}

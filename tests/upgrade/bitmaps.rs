//! Dirty bitmaps during upgrades: exactly the ranges written before, during and after successful
//! and failed upgrades are marked.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use serde_json::{Value, json};

use super::{UPGRADE_FAILED, UpgradedDaemon, proxy::UpgradeStep};
use crate::{
    harness::{Scratch, Serve, TestClient, nbdsh_command, qemu_img, text, weir_image},
    qcow2_bitmaps::map_of,
};

const DISK_BYTES: u64 = 1 << 30;
/// Granularity of `fine`; that of `coarse` is sixteen times as large.
const FINE_GRANULARITY: u64 = 4096;

/// Small random writes, zeroes and discards, several in flight, until a file exists. From time to
/// time and at the end, the bitmap on this connection is compared with the changes. Prints the
/// granules.
const CLIENT: &str = "\
import json, os, random
uri, stop = arguments
GRANULE, DISK, CONTEXT = 4096, 1 << 30, 'qemu:dirty-bitmap:fine'
h.add_meta_context(CONTEXT)
h.connect_uri(uri)
def shown():
    found, at = set(), 0
    while at < DISK:
        runs = []
        def take(context, offset, entries, error):
            assert context == CONTEXT and offset == at
            runs.extend(zip(entries[::2], entries[1::2]))
        h.block_status(DISK - at, at, take)
        for length, flags in runs:
            if flags & 1:
                found.update(range(at // GRANULE, (at + length) // GRANULE))
            at += length
    return found
changed, choose, turn = set(), random.Random(1), 0
print('there', flush=True)
while turn < 50 or not os.path.exists(stop):
    flying = []
    for _ in range(8):
        length = choose.choice([512, 4096, 12288])
        at = choose.randrange((DISK - length) // 512) * 512
        changed.update(range(at // GRANULE, (at + length - 1) // GRANULE + 1))
        kind = choose.randrange(8)
        if kind == 0:
            flying.append(h.aio_zero(length, at))
        elif kind == 1:
            flying.append(h.aio_trim(length, at))
        else:
            flying.append(h.aio_pwrite(os.urandom(length), at))
    for cookie in flying:
        while not h.aio_command_completed(cookie):
            h.poll(-1)
    if turn % 100 == 0:
        assert shown() == changed, turn
    turn += 1
assert shown() == changed
h.flush()
print(json.dumps(sorted(changed)))
";

fn image(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&path), &DISK_BYTES.to_string()]).succeeds();
    for (name, granularity) in [("fine", "4k"), ("coarse", "64k"), ("off", "64k")] {
        qemu_img(["bitmap", "--add", "-g", granularity, text(&path), name]).succeeds();
    }
    qemu_img(["bitmap", "--disable", text(&path), "off"]).succeeds();
    path
}

fn arguments(path: &Path) -> [&str; 7] {
    [text(path), "--format", "qcow2", "--bitmap", "fine", "--bitmap", "coarse"]
}

/// The granules that are marked according to a map.
#[track_caller]
fn marked(map: &str, granule: u64) -> BTreeSet<u64> {
    let map: Value = serde_json::from_str(map).unwrap();
    let dirty = map.as_array().unwrap().iter().filter(|extent| extent["type"] == 1);
    let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
    dirty
        .flat_map(|extent| {
            let at = number(extent, "offset");
            at / granule..(at + number(extent, "length")) / granule
        })
        .collect()
}

/// Asserts the content of the bitmaps according to QEMU, and that `check` finds no errors.
#[track_caller]
fn assert_qemu_reads(path: &Path, fine: &BTreeSet<u64>) {
    qemu_img(["check", "-q", text(path)]).succeeds();
    let sees =
        |name: &str| map_of(name, &["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, text(path), "]"]);
    assert!(marked(&sees("fine"), FINE_GRANULARITY) == *fine, "fine");
    let coarse = fine.iter().map(|granule| granule / 16).collect();
    assert!(marked(&sees("coarse"), 16 * FINE_GRANULARITY) == coarse, "coarse");
    assert!(marked(&sees("off"), 16 * FINE_GRANULARITY).is_empty(), "it is disabled");
}

fn flags(path: &Path) -> Value {
    let info = qemu_img(["info", "-U", "--output=json", text(path)]).json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().iter();
    bitmaps.map(|bitmap| (bitmap["name"].as_str().unwrap().to_owned(), bitmap["flags"].clone())).collect()
}

/// Starts a client; returns once it is connected.
fn connected(script: &str, arguments: &[&str]) -> Child {
    let mut client = nbdsh_command(&format!("arguments = {arguments:?}\n{script}"));
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().expect("nbdsh was found");
    client.stdout.as_mut().expect("piped").read_exact(&mut [0; 6]).expect("the client connects");
    client
}

#[track_caller]
fn printed(client: Child) -> String {
    let output = client.wait_with_output().expect("the child can be waited for");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn exactly_the_written_granules_are_marked() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let stop = scratch.path("stop");
    let fixture = UpgradedDaemon::new(scratch, &[&arguments(&path)[..], &["--iops-total", "600"]].concat());
    let mut current = fixture.serve().start();
    let client = connected(CLIENT, &[&current.uri("disk"), text(&stop)]);
    // A new process fails at each step, upgrades succeed in between, and requests are waiting every
    // time.
    for failed in 0..UpgradeStep::ALL.len() + 3 {
        fixture.fail_at(failed);
        current.wait_for_logs(UPGRADE_FAILED, failed % 3 + 1);
        if failed % 3 == 2 {
            current = fixture.upgrade(current).0;
        }
    }
    fixture.scratch.file("stop", "");
    let fine: Vec<u64> = serde_json::from_str(printed(client).trim()).unwrap();
    let fine = BTreeSet::from_iter(fine);
    let current = fixture.upgrade(current).0;
    for (name, granule, expected) in [
        ("fine", FINE_GRANULARITY, fine.clone()),
        ("coarse", 16 * FINE_GRANULARITY, fine.iter().map(|granule| granule / 16).collect()),
    ] {
        assert!(marked(&map_of(name, &[&current.uri("disk")]), granule) == expected, "{name}");
    }
    current.stop();
    assert_eq!(flags(&path), json!({"off": [], "fine": ["auto"], "coarse": ["auto"]}));
    assert_qemu_reads(&path, &fine);
}

/// Between an upgrade and the next write the bitmaps in the file are complete; after that they are
/// flagged as in use.
#[test]
fn crash_after_an_upgrade_leaves_consistent_or_flagged_bitmaps() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let fixture = UpgradedDaemon::new(scratch, &arguments(&path));
    let good = json!({"off": [], "fine": ["auto"], "coarse": ["auto"]});
    let in_use = json!({"off": [], "fine": ["in-use", "auto"], "coarse": ["in-use", "auto"]});
    for fails in [false, true] {
        let mut current = fixture.serve().start();
        current.nbdsh("disk", "h.pwrite(b'x' * 512, 8192)\nh.flush()");
        assert_eq!(flags(&path), in_use);
        if fails {
            fixture.kill_new_process(UpgradeStep::Ready);
            current.wait_for_log(UPGRADE_FAILED);
        } else {
            current = fixture.upgrade(current).0;
        }
        assert_eq!(flags(&path), good);
        current.crash();
        // Leaked clusters are permitted.
        let _ = TestClient::new("qemu-img").args(["check", "-q", "-r", "leaks", text(&path)]).run();
        assert_qemu_reads(&path, &BTreeSet::from([2]));
    }
    let current = fixture.serve().start();
    let current = fixture.upgrade(current).0;
    current.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\nh.flush()");
    assert_eq!(flags(&path), in_use);
    current.crash();
    let stderr = Serve::new(&fixture.scratch).args(arguments(&path)).fails();
    assert!(stderr.contains("bitmap \"fine\" is marked in-use and may be inconsistent"), "{stderr}");
}

/// Metadata contexts stay: those of a read-only image, and of a bitmap of its backing file.
#[test]
fn metadata_contexts_survive() {
    let scratch = Scratch::new();
    let (path, over) = (image(&scratch), scratch.path("over.qcow2"));
    let writer = Serve::new(&scratch).args(arguments(&path)).start();
    writer.nbdsh("disk", "h.pwrite(b'x' * 512, 8192)");
    writer.stop();
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(&path), text(&over)]).succeeds();
    weir_image(&["bitmap", "--add", "-g", "64k", text(&over), "own"]).succeeds();
    let script = "\
import sys
for name in ['fine', 'own'][:int(arguments[1])]:
    h.add_meta_context('qemu:dirty-bitmap:' + name)
h.connect_uri(arguments[0])
def shown():
    runs = []
    def take(context, offset, entries, error):
        runs.append((context, [entry for entry in zip(entries[::2], entries[1::2])]))
    h.block_status(65536, 0, take)
    return sorted(runs)
before = shown()
assert before[0] == ('qemu:dirty-bitmap:fine', [(8192, 0), (4096, 1), (53248, 0)]), before
print('there', flush=True)
sys.stdin.readline()
assert shown() == before, shown()
";
    let on_top = [text(&over), "--format", "qcow2", "--read-only", "--bitmap", "fine", "--bitmap", "own"];
    let of_base = [&arguments(&path)[..], &["--read-only"]].concat();
    for (arguments, name, bitmaps) in [(&of_base[..], "disk", "1"), (&on_top, "over", "2")] {
        let fixture = UpgradedDaemon::new(Scratch::new(), arguments);
        let current = fixture.serve().start();
        let mut client = connected(script, &[&current.uri(name), bitmaps]);
        fixture.kill_new_process(UpgradeStep::Ready);
        current.wait_for_log(UPGRADE_FAILED);
        let current = fixture.upgrade(current).0;
        client.stdin.as_mut().expect("piped").write_all(b"\n").expect("the client waits for input");
        printed(client);
        current.stop();
    }
}

//! Bitmaps record on: what was written before, during and after takeovers, and after those that
//! came to nothing, is marked, and nothing else.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use serde_json::{Value, json};

use super::{CONTINUES, UpgradedDaemon, between::UpgradeStep};
use crate::{
    harness::{TestClient, Scratch, Serve, nbdsh_command, qemu_img, text, weir_image},
    qcow2_bitmaps::map_of,
};

const DISK_BYTES: u64 = 1 << 30;
/// Granules of `fine`; those of `coarse` are sixteen times as large.
const FINE: u64 = 4096;

/// Writes, zeroes and discards a little here and there, several at a time, until there is a file;
/// now and then, and at the end, what the bitmap shows on this connection is compared with what was
/// changed. Prints the granules.
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

/// The granules that a map says are marked.
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

/// What QEMU finds in the file; and the image is right.
#[track_caller]
fn qemu_sees(path: &Path, fine: &BTreeSet<u64>) {
    qemu_img(["check", "-q", text(path)]).succeeds();
    let sees =
        |name: &str| map_of(name, &["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, text(path), "]"]);
    assert!(marked(&sees("fine"), FINE) == *fine, "fine");
    let coarse = fine.iter().map(|granule| granule / 16).collect();
    assert!(marked(&sees("coarse"), 16 * FINE) == coarse, "coarse");
    assert!(marked(&sees("off"), 16 * FINE).is_empty(), "it is disabled");
}

fn flags(path: &Path) -> Value {
    let info = qemu_img(["info", "-U", "--output=json", text(path)]).json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().iter();
    bitmaps.map(|bitmap| (bitmap["name"].as_str().unwrap().to_owned(), bitmap["flags"].clone())).collect()
}

/// It has said that it is connected.
fn connected(script: &str, arguments: &[&str]) -> Child {
    let mut client = nbdsh_command(&format!("arguments = {arguments:?}\n{script}"));
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().expect("nbdsh was found");
    client.stdout.as_mut().expect("piped").read_exact(&mut [0; 6]).expect("it comes so far");
    client
}

#[track_caller]
fn printed(client: Child) -> String {
    let output = client.wait_with_output().expect("it is ours");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn exactly_the_written_granules_are_marked() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let stop = scratch.path("stop");
    let house = UpgradedDaemon::new(scratch, &[&arguments(&path)[..], &["--iops-total", "600"]].concat());
    let mut current = house.serve().start();
    let client = connected(CLIENT, &[&current.uri("disk"), text(&stop)]);
    // Each step is a newcomer's last, in between some take over, and all of them find requests that
    // wait.
    for failed in 0..UpgradeStep::ALL.len() + 3 {
        house.fail_at(failed);
        current.wait_for_logs(CONTINUES, failed % 3 + 1);
        if failed % 3 == 2 {
            current = house.upgrade(current).0;
        }
    }
    house.scratch.file("stop", "");
    let fine: Vec<u64> = serde_json::from_str(printed(client).trim()).unwrap();
    let fine = BTreeSet::from_iter(fine);
    let current = house.upgrade(current).0;
    for (name, granule, expected) in [
        ("fine", FINE, fine.clone()),
        ("coarse", 16 * FINE, fine.iter().map(|granule| granule / 16).collect()),
    ] {
        assert!(marked(&map_of(name, &[&current.uri("disk")]), granule) == expected, "{name}");
    }
    current.stop();
    assert_eq!(flags(&path), json!({"off": [], "fine": ["auto"], "coarse": ["auto"]}));
    qemu_sees(&path, &fine);
}

/// From a takeover to the next change the file has all of it, and from then on says that it has
/// not.
#[test]
fn crash_after_an_upgrade_leaves_consistent_or_flagged_bitmaps() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let house = UpgradedDaemon::new(scratch, &arguments(&path));
    let good = json!({"off": [], "fine": ["auto"], "coarse": ["auto"]});
    let in_use = json!({"off": [], "fine": ["in-use", "auto"], "coarse": ["in-use", "auto"]});
    for fails in [false, true] {
        let mut current = house.serve().start();
        current.nbdsh("disk", "h.pwrite(b'x' * 512, 8192)\nh.flush()");
        assert_eq!(flags(&path), in_use);
        if fails {
            house.kill_new_process(UpgradeStep::Ready);
            current.wait_for_log(CONTINUES);
        } else {
            current = house.upgrade(current).0;
        }
        assert_eq!(flags(&path), good);
        current.crash();
        // Clusters that nothing leads to may be left, and no more.
        let _ = TestClient::new("qemu-img").args(["check", "-q", "-r", "leaks", text(&path)]).run();
        qemu_sees(&path, &BTreeSet::from([2]));
    }
    let current = house.serve().start();
    let current = house.upgrade(current).0;
    current.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\nh.flush()");
    assert_eq!(flags(&path), in_use);
    current.crash();
    let said = Serve::new(&house.scratch).args(arguments(&path)).fails();
    assert!(said.contains("bitmap \"fine\" was not kept up to date"), "{said}");
}

/// No view is lost, also of an image that is only read, and of a bitmap of its backing file.
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
    let on_top = [text(&over), "--format", "qcow2", "--bitmap", "fine", "--bitmap", "own"];
    let of_base = [&arguments(&path)[..], &["--read-only"]].concat();
    for (arguments, name, bitmaps) in [(&of_base[..], "disk", "1"), (&on_top, "over", "2")] {
        let house = UpgradedDaemon::new(Scratch::new(), arguments);
        let current = house.serve().start();
        let mut client = connected(script, &[&current.uri(name), bitmaps]);
        house.kill_new_process(UpgradeStep::Ready);
        current.wait_for_log(CONTINUES);
        let current = house.upgrade(current).0;
        client.stdin.as_mut().expect("piped").write_all(b"\n").expect("it waits for it");
        printed(client);
        current.stop();
    }
}

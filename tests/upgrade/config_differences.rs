//! An upgrade resets changes that were made without `--save` to the config, and logs them.

use serde_json::json;

use super::UpgradedDaemon;
use crate::harness::{MIB, Qmp, Scratch, assert_contains, text};

#[test]
fn differences_from_the_config_are_logged() {
    let scratch = Scratch::new();
    for name in ["a", "b", "c"] {
        scratch.sparse(&format!("{name}.raw"), MIB);
    }
    let disk = |name: &str, more: &str| {
        format!("[disk.{name}]\nimage = \"{name}.raw\"\nformat = \"raw\"\ngroup = \"gold\"\n{more}\n")
    };
    let disks = [disk("a", "bps-read = \"10M\""), disk("b", "weight = 200")].concat();
    let file = scratch.file("weir.toml", format!("[group.gold]\niops-total = 1000\n\n{disks}"));
    let fixture = UpgradedDaemon::new(scratch, &["--config", text(&file)]);
    let current = fixture.serve().start();
    let mut qmp = Qmp::negotiated(&fixture.control());
    qmp.command("x-weir-set", json!({ "name": "a", "bps-read": 0, "iops-write": 500, "prefetch": "off" }));
    qmp.command("x-weir-set", json!({ "name": "gold", "iops-total": 2000 }));
    // A disk that is not in the config is transferred unchanged.
    let file_of_c = json!({ "driver": "file", "filename": text(&fixture.scratch.path("c.raw")) });
    qmp.command("blockdev-add", json!({ "driver": "raw", "node-name": "c", "file": file_of_c }));
    qmp.command("x-weir-set", json!({ "name": "c", "iops-total": 7 }));
    drop(qmp);
    let (current, _) = fixture.upgrade(current);
    let why = format!(", from {} (use --save to keep a change)", text(&file));
    assert_contains(&current.wait_for_log("group gold: "), &[&format!("iops-total 2000 → 1000{why}")]);
    let line = current.wait_for_log("disk a: ");
    assert_contains(
        &line,
        &["disk a: prefetch off → auto, bps-read none → 10M, iops-write 500 → none", &why],
    );
    for name in ["disk b: ", "disk c: "] {
        assert!(!current.log_text().contains(name), "{}", current.log_text());
    }
    // Without differences nothing is logged.
    let (current, _) = fixture.upgrade(current);
    let log = current.stop();
    assert!(!log.contains("use --save"), "{log}");
}

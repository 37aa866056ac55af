//! What `weir throttle` prints.

use super::*;
use crate::client::change::Setpoint;

fn report() -> (Value, Report) {
    let answer = json!({
        "disks": [{
            "name": "vm1", "group": "gold", "weight": 200,
            "limits": { "iops-total": 1000, "iops-total-max": 5000, "bps-read": 10 << 20 }
        }],
        "groups": [
            { "name": "gold", "group": "host", "weight": 100, "limits": {} },
            { "name": "host", "weight": 100, "watermark": 90, "limits": { "bps-total": 1 << 30 } }
        ]
    });
    let report = Report::read(&answer).unwrap();
    (answer, report)
}

#[test]
fn settings_and_what_holds_from_above() {
    let (answer, report) = report();
    let shown = |name: &str| show(&report, name, report.find(name).unwrap());
    let expect = "\
disk vm1
  bps-read        10M
  iops-total      1000
  iops-total-max  5000
  weight          200
  group           gold
  held with others by group gold: -
  held with others by group host: bps 1G
";
    assert_eq!(shown("vm1"), expect);
    assert_eq!(shown("host"), "group host\n  bps-total  1G\n  weight     100\n  watermark  90\n");
    assert!(shown("gold").contains("  no limits of its own\n"));
    assert_eq!(serde_json::from_str::<Value>(&entry(&answer, "disk", "vm1")).unwrap(), answer["disks"][0]);
}

#[test]
fn a_change_is_told_with_what_was_before() {
    let (_, report) = report();
    let before = report.find("vm1").unwrap().settings();
    let mut change = Change::default();
    change.set(Name::find("iops-total").unwrap(), Setpoint::Number(2000));
    change.set(Name::Weight, Setpoint::Number(200));
    change.set(Name::Group, Setpoint::Text(String::new()));
    let expect = "\
vm1: iops-total: 1000 → 2000
vm1: weight: 200, as before
vm1: group: gold → none
vm1: saved in /etc/weir.toml
";
    assert_eq!(told("vm1", before, &change, Some("/etc/weir.toml")), expect);
    let json = json!({
        "name": "vm1", "saved": "/etc/weir.toml",
        "changed": {
            "iops-total": { "before": 1000, "after": 2000 }, "weight": { "before": 200, "after": 200 },
            "group": { "before": "gold", "after": "" }
        }
    });
    assert_eq!(changed("vm1", before, &change, Some("/etc/weir.toml")), json);
}

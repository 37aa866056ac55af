//! Output of `weir throttle`.

use serde_json::json;

use super::*;

fn report() -> (Value, DaemonReport) {
    let response = json!({
        "disks": [{
            "name": "vm1", "group": "gold", "weight": 200,
            "limits": { "iops-total": 1000, "iops-total-max": 5000, "bps-read": 10 << 20 }
        }],
        "groups": [
            { "name": "gold", "group": "host", "weight": 100, "limits": {} },
            { "name": "host", "weight": 100, "watermark": 90, "limits": { "bps-total": 1 << 30 } }
        ]
    });
    let report = DaemonReport::read(&response.to_string()).unwrap();
    (response, report)
}

#[test]
fn settings_and_limits_of_groups_above() {
    let (response, report) = report();
    let shown = |name: &str| show(&report, name, report.find(name).unwrap());
    let expect = "\
disk vm1
  bps-read        10M
  iops-total      1000
  iops-total-max  5000
  weight          200
  group           gold
  a full burst of iops-total is 5000 operations at once
  limits of group gold: -
  limits of group host: bps 1G
";
    assert_eq!(shown("vm1"), expect);
    assert_eq!(shown("host"), "group host\n  bps-total  1G\n  weight     100\n  watermark  90\n");
    assert!(shown("gold").contains("  no own limits\n"));
    let status = serde_json::to_value(report.find("vm1").unwrap()).unwrap();
    let disk = response["disks"][0].as_object().unwrap();
    assert!(disk.iter().all(|(key, value)| status[key] == *value), "{status}");
}

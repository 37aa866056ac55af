//! Output of a probe: a table, or one JSON object.

use std::{fmt::Write as _, path::PathBuf};

use console::table::{TextTable, columns};
use policy::request::Direction;
use serde::Serialize;
use settings::state::CapacityFigures;

use super::load::{DEPTH, ProbePattern, ProbeResult};

#[derive(Debug)]
pub(super) struct ProbeReport {
    pub(super) target: String,
    /// The device's node and its stable name, if the target is on one.
    pub(super) device: Option<(String, String)>,
    pub(super) size_bytes: u64,
    pub(super) figures: Vec<ProbeResult>,
    pub(super) capacity: CapacityFigures,
    pub(super) not_measured: Vec<&'static str>,
    pub(super) kept: Option<PathBuf>,
}

impl ProbeReport {
    pub(super) fn text(&self) -> String {
        let mut text = match &self.device {
            Some((node, key)) => format!("{} on {node} ({key})\n", self.target),
            None => format!("{}, on no disk of this machine\n", self.target),
        };
        let _ = writeln!(text, "{} measured, {DEPTH} requests at a time\n", size(self.size_bytes));
        let mut table = TextTable::new(columns(&["load"], &["block", "IOPS", "MiB/s", "spread"]));
        for figure in &self.figures {
            table.row(vec![
                figure.load.name().to_owned(),
                size(figure.load.block_bytes as u64),
                // Large blocks on slow disks complete only a few times per second.
                if figure.rate < 10.0 { format!("{:.1}", figure.rate) } else { figure.iops().to_string() },
                format!("{:.1}", figure.bps() as f64 / f64::from(1 << 20)),
                format!("{:.0}%", figure.spread * 100.0),
            ]);
        }
        text += &table.render(false);
        text.push('\n');
        for item in &self.not_measured {
            let _ = writeln!(text, "not measured: {item}");
        }
        let _ = match &self.kept {
            Some(path) => writeln!(text, "saved in {}", path.display()),
            None if self.device.is_some() => writeln!(text, "not saved"),
            None => writeln!(text, "not saved: results are saved for disks of this machine only"),
        };
        text
    }

    pub(super) fn json(&self) -> String {
        let load = |figure: &ProbeResult| LoadObject {
            pattern: match figure.load.pattern {
                ProbePattern::Random => "random",
                ProbePattern::Sequential => "sequential",
            },
            direction: match figure.load.direction {
                Direction::Read => "read",
                Direction::Write => "write",
            },
            block_bytes: figure.load.block_bytes,
            depth: DEPTH,
            iops: figure.iops(),
            bps: figure.bps(),
            spread: figure.spread,
        };
        let object = ProbeObject {
            target: &self.target,
            size_bytes: self.size_bytes,
            loads: self.figures.iter().map(load).collect(),
            capacity: &self.capacity,
            not_measured: &self.not_measured,
            device: self.device.as_ref().map(|(name, key)| DeviceObject { name, key }),
            kept: self.kept.as_ref().map(|path| path.display().to_string()),
        };
        serde_json::to_string_pretty(&object).expect("all keys are strings") + "\n"
    }
}

/// Output of `weir probe --json`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct ProbeObject<'a> {
    target: &'a str,
    size_bytes: u64,
    loads: Vec<LoadObject>,
    capacity: &'a CapacityFigures,
    not_measured: &'a [&'static str],
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceObject<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<String>,
}

#[derive(Serialize)]
struct DeviceObject<'a> {
    name: &'a str,
    /// Stable name of the device.
    key: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct LoadObject {
    pattern: &'static str,
    direction: &'static str,
    block_bytes: usize,
    depth: usize,
    iops: u64,
    bps: u64,
    /// Relative spread of the rate.
    spread: f64,
}

/// Formats a size in the largest unit that divides it.
pub(super) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let largest = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    largest.map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::load::ProbeLoad;

    fn report() -> ProbeReport {
        let load = ProbeLoad { pattern: ProbePattern::Random, direction: Direction::Read, block_bytes: 4096 };
        ProbeReport {
            target: "/srv".to_owned(),
            device: Some(("/dev/vda".to_owned(), "serial x, 5 bytes".to_owned())),
            size_bytes: 1 << 30,
            figures: vec![ProbeResult { load, rate: 25_600.0, spread: 0.054 }],
            capacity: CapacityFigures { read_iops: 25_600, ..CapacityFigures::default() },
            not_measured: vec!["writes: excluded by --read-only"],
            kept: Some("/var/lib/weir/capacity/x.json".into()),
        }
    }

    #[test]
    fn text_report_is_a_table() {
        let expect = "\
/srv on /dev/vda (serial x, 5 bytes)
1 GiB measured, 32 requests at a time

load         block   IOPS  MiB/s  spread
random read  4 KiB  25600  100.0      5%

not measured: writes: excluded by --read-only
saved in /var/lib/weir/capacity/x.json
";
        assert_eq!(report().text(), expect);
        let without_device = ProbeReport { device: None, kept: None, ..report() };
        assert!(without_device.text().starts_with("/srv, on no disk of this machine\n"));
        let not_saved = "not saved: results are saved for disks of this machine only\n";
        assert!(without_device.text().ends_with(not_saved));
    }

    #[test]
    fn json_report_is_an_object() {
        let object: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        assert_eq!(object["loads"][0]["bps"], 104_857_600);
        assert_eq!(object["capacity"]["read-iops"], 25_600);
        assert_eq!(object["device"]["name"], "/dev/vda");
        let without_device = ProbeReport { device: None, kept: None, ..report() };
        let object: serde_json::Value = serde_json::from_str(&without_device.json()).unwrap();
        assert!(object.get("device").is_none() && object.get("kept").is_none());
    }

    #[test]
    fn sizes_are_integers_of_the_largest_unit() {
        for (bytes, text) in
            [(0, "0 B"), (5, "5 B"), (4096, "4 KiB"), (3 << 20, "3 MiB"), (1 << 40, "1024 GiB")]
        {
            assert_eq!(size(bytes), text);
        }
    }
}

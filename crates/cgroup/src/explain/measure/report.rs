//! The result of `--measure`, as a table and as JSON.

use std::fmt::Write as _;

use console::{
    figures,
    table::{ColumnAlignment, TextTable},
};
use serde::Serialize;

use super::{LimitCompliance, MeasuredPaths, PathFigures, PathResult, trace::TraceTotals};
use crate::explain::text::clean;

pub(in super::super) fn text(measured: &MeasuredPaths) -> String {
    let mut text =
        format!("\nmeasured in {} on {}:\n", clean(&measured.directory.display().to_string()), measured.node);
    let columns = [
        ("PATH", ColumnAlignment::Left),
        ("LIMIT", ColumnAlignment::Right),
        ("RATE", ColumnAlignment::Right),
        ("CHARGED", ColumnAlignment::Right),
        ("LIMIT IS", ColumnAlignment::Left),
        ("WAITED IN", ColumnAlignment::Left),
    ];
    let mut table = TextTable::new(columns);
    for path in &measured.paths {
        let limit = path.limit_bps.map_or_else(|| "-".to_owned(), |limit| rate(limit as f64));
        let row = match &path.result {
            Ok(figures) => [
                limit,
                rate(figures.bps()),
                charged(figures),
                compliance_name(figures.compliance).to_owned(),
                describe_waiting(figures),
            ],
            // The error takes the place of the last column.
            Err(error) => [limit, "-".to_owned(), "-".to_owned(), "not measured".to_owned(), error.clone()],
        };
        table.row([path.name.to_owned()].into_iter().chain(row).collect());
    }
    text += &table.render(false);
    if let Some(untraced) = &measured.untraced {
        let _ = writeln!(text, "no trace, so the waiting place is derived from times: {}", clean(untraced));
    }
    text
}

/// Result of `weir cgroup explain --measure` in JSON.
#[derive(Serialize)]
pub(in super::super) struct MeasurementReport {
    directory: String,
    device: String,
    /// Reason why no trace could be made.
    untraced: Option<String>,
    paths: Vec<PathReport>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct PathReport {
    path: String,
    limit_bps: Option<u64>,
    #[serde(flatten)]
    outcome: PathOutcome,
}

#[derive(Serialize)]
#[serde(untagged)]
enum PathOutcome {
    Measured(FiguresReport),
    Failed { error: String },
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct FiguresReport {
    bytes: u64,
    seconds: f64,
    calls_seconds: f64,
    bps: f64,
    charged_bytes: u64,
    /// Bytes that all processes moved on the disk.
    device_bytes: u64,
    limit_is: &'static str,
    waited: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<TraceTotals>,
}

pub(in super::super) fn report(measured: MeasuredPaths) -> MeasurementReport {
    let MeasuredPaths { directory, node, untraced, paths } = measured;
    MeasurementReport {
        directory: directory.display().to_string(),
        device: node,
        untraced,
        paths: paths.into_iter().map(path_report).collect(),
    }
}

fn path_report(PathResult { name, limit_bps, result }: PathResult) -> PathReport {
    let outcome = match result {
        Err(error) => PathOutcome::Failed { error },
        Ok(figures) => PathOutcome::Measured(FiguresReport {
            bytes: figures.bytes,
            seconds: figures.seconds,
            calls_seconds: figures.calls_seconds,
            bps: figures.bps(),
            charged_bytes: figures.charged_bytes,
            device_bytes: figures.disk_bytes,
            limit_is: compliance_name(figures.compliance),
            waited: describe_waiting(&figures),
            trace: figures.traced,
        }),
    };
    PathReport { path: name.replace(' ', "-"), limit_bps, outcome }
}

fn rate(bps: f64) -> String {
    format!("{}/s", figures::bytes(bps))
}

/// Share of the bytes that was charged to the cgroup, at most 100%: metadata counts as well, while
/// pages truncated before writeback do not.
fn charged(figures: &PathFigures) -> String {
    figures::share((figures.charged_bytes as f64 / figures.bytes.max(1) as f64).min(1.0))
}

fn compliance_name(compliance: LimitCompliance) -> &'static str {
    match compliance {
        LimitCompliance::Yes => "kept",
        LimitCompliance::No => "IGNORED",
        LimitCompliance::Slower => "not reached",
        LimitCompliance::NotLimited => "not set",
        LimitCompliance::NoIo => "no I/O",
    }
}

fn describe_waiting(figures: &PathFigures) -> String {
    let Some(traced) = figures.traced else {
        return by_times(figures);
    };
    let mut parts = Vec::new();
    if traced.held_ms > 0 {
        let held = figures::time(traced.held_ms.saturating_mul(1_000_000));
        parts.push(format!("{held} in balance_dirty_pages"));
    }
    // Without `by_others`: requests of unrelated processes on the same disk would distort the
    // shares.
    let TraceTotals { by_process, by_throttle, by_writeback, .. } = traced;
    let all = by_process + by_throttle + by_writeback;
    let senders = [
        (by_throttle, "throttled by blk-throttle"),
        (by_writeback, "sent by a writeback worker at once"),
        (by_process, "sent by the process at once"),
    ];
    for (bytes, sender) in senders {
        // Tasks that submitted no byte are omitted.
        if bytes > 0 {
            parts.push(format!("{} {sender}", figures::share(bytes as f64 / all as f64)));
        }
    }
    if parts.is_empty() { "no request reached the disk".to_owned() } else { parts.join(", ") }
}

fn by_times(figures: &PathFigures) -> String {
    // Clock readings of two processes can differ slightly.
    let later = (figures.seconds - figures.calls_seconds).max(0.0);
    let calls = figures::time((figures.calls_seconds * 1e9) as u64);
    if later < 0.001 {
        format!("{calls} in the calls themselves")
    } else {
        format!(
            "{calls} in the calls themselves, {} until it was written",
            figures::time((later * 1e9) as u64)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> PathFigures {
        PathFigures {
            bytes: 8 << 20,
            seconds: 4.0,
            calls_seconds: 1.0,
            charged_bytes: 6 << 20,
            disk_bytes: 9 << 20,
            traced: Some(TraceTotals {
                by_throttle: 6 << 20,
                by_writeback: 2 << 20,
                held_ms: 950,
                ..TraceTotals::default()
            }),
            compliance: LimitCompliance::Yes,
        }
    }

    #[test]
    fn report_names_the_place_of_waiting() {
        let expected = "950ms in balance_dirty_pages, 75% throttled by blk-throttle, 25% sent by a \
                    writeback worker at once";
        assert_eq!(describe_waiting(&figures()), expected);
        let untraced = PathFigures { traced: None, ..figures() };
        assert_eq!(describe_waiting(&untraced), "1.0s in the calls themselves, 3.0s until it was written");
        let cached = PathFigures { traced: Some(TraceTotals::default()), ..figures() };
        assert_eq!(describe_waiting(&cached), "no request reached the disk");
    }

    #[test]
    fn a_row_for_each_path() {
        let paths = vec![
            PathResult { name: "direct writes", limit_bps: Some(2 << 20), result: Ok(figures()) },
            PathResult {
                name: "direct reads",
                limit_bps: None,
                result: Err("the file system has no direct I/O".to_owned()),
            },
        ];
        let measured =
            MeasuredPaths { directory: "/data".into(), node: "/dev/vda".to_owned(), untraced: None, paths };
        let rendered = text(&measured);
        let lines: Vec<&str> = rendered.lines().collect();
        assert_eq!(lines[1], "measured in /data on /dev/vda:");
        assert!(lines[3].starts_with("direct writes  2.0M/s  2.0M/s      75%  kept"), "{rendered}");
        assert!(lines[4].ends_with("not measured  the file system has no direct I/O"), "{rendered}");
        let value = serde_json::to_value(report(measured)).unwrap();
        assert_eq!(value["paths"][0]["charged-bytes"], 6 << 20);
        assert_eq!(value["paths"][0]["trace"]["held-in-balance-dirty-pages-ms"], 950);
        assert_eq!(value["paths"][1]["error"], "the file system has no direct I/O");
    }
}

//! The result of `--measure`, as a table and as JSON.

use std::fmt::Write as _;

use console::{
    figures,
    table::{ColumnAlignment, TextTable},
};
use serde_json::{Value, json};

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

pub(in super::super) fn json(measured: &MeasuredPaths) -> Value {
    json!({
        "directory": measured.directory.display().to_string(),
        "device": measured.node,
        "untraced": measured.untraced,
        "paths": measured.paths.iter().map(path_json).collect::<Vec<_>>(),
    })
}

fn path_json(path: &PathResult) -> Value {
    let mut object = json!({ "path": path.name.replace(' ', "-"), "limit-bps": path.limit_bps });
    match &path.result {
        Err(error) => object["error"] = json!(error),
        Ok(figures) => {
            object["bytes"] = json!(figures.bytes);
            object["seconds"] = json!(figures.seconds);
            object["calls-seconds"] = json!(figures.calls_seconds);
            object["bps"] = json!(figures.bps());
            object["charged-bytes"] = json!(figures.charged_bytes);
            object["device-bytes"] = json!(figures.disk_bytes);
            object["limit-is"] = json!(compliance_name(figures.compliance));
            object["waited"] = json!(describe_waiting(figures));
            if let Some(traced) = figures.traced {
                object["trace"] = json!({
                    "sent-by-process-bytes": traced.by_process,
                    "sent-by-throttle-bytes": traced.by_throttle,
                    "sent-by-writeback-bytes": traced.by_writeback,
                    "sent-by-others-bytes": traced.by_others,
                    "held-in-balance-dirty-pages-ms": traced.held_ms,
                });
            }
        }
    }
    object
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
        LimitCompliance::NoIo => "not asked",
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
        let value = json(&measured);
        assert_eq!(value["paths"][0]["charged-bytes"], 6 << 20);
        assert_eq!(value["paths"][0]["trace"]["held-in-balance-dirty-pages-ms"], 950);
        assert_eq!(value["paths"][1]["error"], "the file system has no direct I/O");
    }
}

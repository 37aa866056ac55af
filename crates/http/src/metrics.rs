//! `/metrics`, in the format that the client prefers.
//!
//! A response is reused within [`FRESH`], so the load does not grow with the number of clients. It
//! is written on a separate thread and sent meanwhile: for a thousand disks it has eight megabytes,
//! and would delay all other requests. While slow clients hold [`MAX_RESPONSES`] responses, new
//! clients receive the last one: otherwise each connection could hold its own.

use std::{
    fmt::{self, Write as _},
    mem,
    sync::Arc,
    time::Instant,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use cgroup::cgroup_counters::CgroupFiguresReader;
use prometheus_client::{
    encoding::{prometheus_protobuf, text},
    registry::Registry,
};
use tokio::{sync::Mutex, task::spawn_blocking};

use super::{
    cgroup_metrics::CgroupMetrics,
    families::MetricFamilies,
    main_thread::{FRESH, MainThread, NoAnswer},
    process_metrics::ProcessMetrics,
    snapshot::DaemonSnapshot,
    streamed_response::{self, ResponseBuffer, ResponsePieces},
};

/// Maximum number of responses in memory for each format, including the cached one.
const MAX_RESPONSES: usize = 3;

const INDEX: &str = "weir: metrics for Prometheus are at /metrics\n";

/// Routes of `--metrics`.
pub(super) fn router(desk: Arc<MainThread>, cgroups: Option<CgroupFiguresReader>) -> Router {
    let page = MetricsPage { main_thread: desk, cgroups, recent: Default::default() };
    Router::new().route("/", get(async || INDEX)).route("/metrics", get(metrics)).with_state(Arc::new(page))
}

struct MetricsPage {
    main_thread: Arc<MainThread>,
    cgroups: Option<CgroupFiguresReader>,
    /// Recent responses by [`MetricsFormat`]. Locked while a response is written.
    recent: [Arc<Mutex<RecentResponses>>; 3],
}

async fn metrics(State(page): State<Arc<MetricsPage>>, headers: HeaderMap) -> Response {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let form = MetricsFormat::preferred(accepted);
    match page.answer(form).await {
        Ok(pieces) => ([(CONTENT_TYPE, form.content_type())], Body::new(pieces)).into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("weir: {why}\n")).into_response(),
    }
}

impl MetricsPage {
    async fn answer(self: &Arc<Self>, form: MetricsFormat) -> Result<ResponsePieces, NoAnswer> {
        // The lock is owned by the writing thread, so that concurrent clients wait for this
        // response.
        let mut recent = Arc::clone(&self.recent[form as usize]).lock_owned().await;
        if let Some(written) = recent.reusable() {
            return Ok(written.into());
        }
        let snapshot = self.main_thread.figures(FRESH).await?;
        let page = Arc::clone(self);
        let (mut writer, pieces) = streamed_response::response_channel();
        spawn_blocking(move || {
            // Formatting is work of milliseconds, too long for the thread that serves connections.
            if form.write(snapshot, page.cgroups.as_ref(), &mut writer).is_some() {
                recent.keep(writer.finish());
            } else {
                tracing::error!(?form, "the metrics cannot be written (request another format)");
            }
        });
        Ok(pieces)
    }
}

/// Responses of one format that clients may still be reading, the newest last.
#[derive(Default)]
struct RecentResponses(Vec<(Instant, Vec<Bytes>)>);

impl RecentResponses {
    /// Last response, if it is fresh, or if there are too many to write another.
    fn reusable(&mut self) -> Option<Vec<Bytes>> {
        if let Some((at, last)) = self.0.last()
            && at.elapsed() < FRESH
        {
            return Some(last.clone());
        }
        // A response that only this cache references is not being read.
        self.0.retain(|(_, pieces)| !pieces.iter().all(Bytes::is_unique));
        (self.0.len() >= MAX_RESPONSES).then(|| self.0.last().map(|(_, pieces)| pieces.clone()))?
    }

    fn keep(&mut self, pieces: Vec<Bytes>) {
        self.0.push((Instant::now(), pieces));
    }
}

/// Format of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricsFormat {
    /// Prometheus's text format 0.0.4, the default.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus's protobuf messages, the only format with native histograms.
    Protobuf,
}

impl MetricsFormat {
    const ALL: [Self; 3] = [Self::Text, Self::OpenMetrics, Self::Protobuf];

    fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }

    /// Format with the highest quality value, the first of equal ones; [`MetricsFormat::Text`] if
    /// none matches (RFC 9110, section 12.5.1).
    fn preferred<'a>(accepted: impl Iterator<Item = &'a str>) -> Self {
        let mut best = (Self::Text, 0.0);
        for range in accepted.flat_map(|line| line.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let mut quality = 1.0;
            let (mut proto, mut encoding) = ("", "");
            for (key, value) in parts.filter_map(|part| part.split_once('=')) {
                match key.trim() {
                    // A malformed quality value excludes the format.
                    "q" => quality = value.trim().parse().unwrap_or(0.0),
                    "proto" => proto = value.trim(),
                    "encoding" => encoding = value.trim(),
                    _ => {}
                }
            }
            let form = Self::ALL.into_iter().find(|form| match form {
                Self::Text => kind.eq_ignore_ascii_case("text/plain"),
                Self::OpenMetrics => kind.eq_ignore_ascii_case("application/openmetrics-text"),
                Self::Protobuf => {
                    kind.eq_ignore_ascii_case("application/vnd.google.protobuf")
                        && (proto, encoding) == ("io.prometheus.client.MetricFamily", "delimited")
                }
            });
            if let Some(form) = form
                && quality > best.1
            {
                best = (form, quality);
            }
        }
        best.0
    }

    /// Writes all metrics. `None` if the format cannot express them.
    fn write(
        self,
        snapshot: Arc<DaemonSnapshot>,
        cgroups: Option<&CgroupFiguresReader>,
        to: &mut ResponseBuffer,
    ) -> Option<()> {
        let (figures, stalled) = cgroups.map(CgroupFiguresReader::read).unwrap_or_default();
        let cgroups = CgroupMetrics { figures, stalled };
        let families = MetricFamilies { snapshot, process: ProcessMetrics::now(), cgroups };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(families));
        match self {
            Self::OpenMetrics => text::encode(to, &registry).ok()?,
            Self::Text => {
                let mut older = TextFormatConverter { to, line: String::new(), help: String::new() };
                text::encode_registry(&mut older, &registry).ok()?;
            }
            // One piece: the library encodes to a buffer only.
            Self::Protobuf => to.add(prometheus_protobuf::encode_to_vec(&registry).ok()?),
        }
        Some(())
    }
}

/// Converter from OpenMetrics to the older text format, in which counter families are named as
/// their samples and units are absent. Samples are identical.
///
/// Converts while the text is written: a conversion of the complete text, nine megabytes, took a
/// fifth of a scrape.
struct TextFormatConverter<'a> {
    to: &'a mut ResponseBuffer,
    /// Incomplete line about a family.
    line: String,
    /// HELP line, which precedes TYPE, but needs the type for its name.
    help: String,
}

impl fmt::Write for TextFormatConverter<'_> {
    /// The library writes the beginning of a line about a family as a separate piece.
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        let is_about = piece.starts_with('#') && self.to.is_at_line();
        // Samples are identical in both formats, so they pass unchanged.
        if self.line.is_empty() && !is_about {
            return self.to.write_str(piece);
        }
        self.line.push_str(piece);
        if self.line.ends_with('\n') {
            self.write_line()?;
            self.line.clear();
        }
        Ok(())
    }
}

impl TextFormatConverter<'_> {
    fn write_line(&mut self) -> fmt::Result {
        if self.line.starts_with("# HELP ") {
            // Kept until the TYPE line with the suffix.
            mem::swap(&mut self.help, &mut self.line);
        } else if let Some(declaration) = self.line.strip_prefix("# TYPE ") {
            let (name, kind) = declaration.trim_end().rsplit_once(' ').unwrap_or((declaration, ""));
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                _ => ("", kind),
            };
            let help_text =
                self.help.strip_prefix("# HELP ").and_then(|help| help.strip_prefix(name)).unwrap_or("\n");
            writeln!(self.to, "# HELP {name}{suffix}{help_text}# TYPE {name}{suffix} {kind}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_readers_share_few_answers() {
        let mut recent = RecentResponses::default();
        let mut respond = |number: usize| {
            recent.0.iter_mut().for_each(|(at, _)| *at -= FRESH);
            let reusable = recent.reusable();
            reusable.unwrap_or_else(|| {
                let written = vec![Bytes::from(vec![0; number]), Bytes::from(vec![0; 1])];
                recent.keep(written.clone());
                written
            })
        };
        let mut readers: Vec<_> = (1..=16).map(&mut respond).collect();
        let length = |pieces: &Vec<Bytes>| pieces[0].len();
        let lengths: Vec<_> = readers.iter().map(length).collect();
        assert_eq!(lengths[..4], [1, 2, 3, 3]);
        assert!(lengths[3..].iter().all(|length| *length == 3));
        // The first client has read a part, then all: there is room for another.
        readers[0].pop();
        assert_eq!(length(&respond(16)), 3);
        readers.remove(0);
        assert_eq!((length(&respond(17)), length(&respond(18))), (17, 17));
        readers.clear();
        assert_eq!(length(&respond(19)), 19);
    }

    #[test]
    fn the_preferred_format_is_chosen() {
        let form = |accept: &str| MetricsFormat::preferred([accept].into_iter());
        assert_eq!(MetricsFormat::preferred(std::iter::empty()), MetricsFormat::Text);
        assert_eq!(form("*/*"), MetricsFormat::Text);
        assert_eq!(form("text/html, application/openmetrics-text"), MetricsFormat::OpenMetrics);
        // Headers of Prometheus 2.42, without and with native histograms.
        let text = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(form(text), MetricsFormat::OpenMetrics);
        let messages = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,*/*;q=0.1";
        assert_eq!(form(messages), MetricsFormat::Protobuf);
        assert_eq!(form("application/openmetrics-text;q=0.2,text/plain;q=0.5"), MetricsFormat::Text);
        assert_eq!(
            form("application/vnd.google.protobuf;proto=other;encoding=delimited"),
            MetricsFormat::Text
        );
        assert_eq!(form("application/openmetrics-text;q=lots"), MetricsFormat::Text);
    }

    #[test]
    fn text_format_names_counters_as_their_samples() {
        let open = [
            ["# HELP ", "weir_disk_read", "_bytes", " Bytes.", "\n"].as_slice(),
            &["# TYPE weir_disk_read_bytes counter\n", "# UNIT weir_disk_read_bytes", " bytes\n"],
            &["weir_disk_read_bytes_total{", "disk", "=\"", "# TYPE", "\"} 1", "\n"],
            &["# HELP weir_build About.\n", "# TYPE weir_build info\n", "weir_build_info{version=\"1\"} 1\n"],
            &["# HELP weir_disk_size_bytes Size.\n", "# TYPE weir_disk_size_bytes gauge", "\n"],
        ];
        let expect = "# HELP weir_disk_read_bytes_total Bytes.\n\
                      # TYPE weir_disk_read_bytes_total counter\n\
                      weir_disk_read_bytes_total{disk=\"# TYPE\"} 1\n\
                      # HELP weir_build_info About.\n\
                      # TYPE weir_build_info gauge\n\
                      weir_build_info{version=\"1\"} 1\n\
                      # HELP weir_disk_size_bytes Size.\n\
                      # TYPE weir_disk_size_bytes gauge\n";
        let (mut writer, _reader) = streamed_response::response_channel();
        let mut older = TextFormatConverter { to: &mut writer, line: String::new(), help: String::new() };
        open.concat().into_iter().try_for_each(|piece| older.write_str(piece)).unwrap();
        assert_eq!(writer.finish().concat(), expect.as_bytes());
    }
}

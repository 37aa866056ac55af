//! `/metrics`: figures in the form that whoever asks prefers.
//!
//! An answer is given again within [`FRESH`]: however many ask, this thread has little to do.
//! While clients that read slowly have [`MOST_READ`] answers, whoever asks gets the last of them:
//! an answer of a thousand disks has twelve megabytes, and each connection could hold another one.

use std::{fmt, mem, sync::Arc, time::Instant};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use cgroup::figures::Reader;
use prometheus_client::{
    encoding::{prometheus_protobuf, text},
    registry::Registry,
};
use tokio::sync::Mutex;

use super::{
    desk::{Desk, FRESH, Silent},
    families::Families,
    process::Process,
    snapshot::Snapshot,
};

/// Answers of one form that may be held at a time, with the one that is kept here.
const MOST_READ: usize = 3;

const INDEX: &str = "weir: its figures for Prometheus are at /metrics\n";

/// Everything that can be asked for.
pub(super) fn router(desk: Arc<Desk>, cgroups: Option<Reader>) -> Router {
    let page = Page { desk, cgroups, given: Mutex::default() };
    Router::new().route("/", get(async || INDEX)).route("/metrics", get(metrics)).with_state(Arc::new(page))
}

struct Page {
    desk: Arc<Desk>,
    cgroups: Option<Reader>,
    /// By [`Form`].
    given: Mutex<[Given; 3]>,
}

async fn metrics(State(page): State<Arc<Page>>, headers: HeaderMap) -> Response {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let form = Form::preferred(accepted);
    match page.answer(form).await {
        Ok(body) => ([(CONTENT_TYPE, form.content_type())], body).into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("weir: {why}\n")).into_response(),
    }
}

impl Page {
    async fn answer(&self, form: Form) -> Result<Bytes, Silent> {
        let mut given = self.given.lock().await;
        let given = &mut given[form as usize];
        if let Some(body) = given.again() {
            return Ok(body);
        }
        let snapshot = self.desk.figures(FRESH).await?;
        let before = given.length();
        let body =
            form.write(snapshot, self.cgroups.as_ref(), before).ok_or("the figures cannot be written")?;
        Ok(given.keep(body))
    }
}

/// Answers of one form that somebody may still be reading, the newest last.
#[derive(Default)]
struct Given(Vec<(Instant, Bytes)>);

impl Given {
    /// The last, if it will do.
    fn again(&mut self) -> Option<Bytes> {
        let (at, last) = self.0.last().cloned()?;
        if at.elapsed() < FRESH {
            return Some(last);
        }
        drop(last);
        self.0.retain(|(_, body)| !body.is_unique());
        (self.0.len() >= MOST_READ).then(|| self.0.last().map(|(_, body)| body.clone()))?
    }

    /// Of the last.
    fn length(&self) -> usize {
        self.0.last().map_or(0, |(_, body)| body.len())
    }

    fn keep(&mut self, body: Bytes) -> Bytes {
        self.0.push((Instant::now(), body.clone()));
        body
    }
}

/// How figures are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Prometheus's text format 0.0.4, for who says nothing.
    Plain,
    /// OpenMetrics 1.0.
    Open,
    /// Prometheus's messages, which alone have native histograms.
    Messages,
}

impl Form {
    const ALL: [Self; 3] = [Self::Plain, Self::Open, Self::Messages];

    fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::Open => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Messages => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }

    /// The one with the highest quality, the first of several; [`Form::Plain`] where none is asked
    /// for (RFC 9110, section 12.5.1).
    fn preferred<'a>(accepted: impl Iterator<Item = &'a str>) -> Self {
        let mut best = (Self::Plain, 0.0);
        for range in accepted.flat_map(|line| line.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let mut quality = 1.0;
            let (mut proto, mut encoding) = ("", "");
            for (key, value) in parts.filter_map(|part| part.split_once('=')) {
                match key.trim() {
                    "q" => quality = value.trim().parse().unwrap_or(0.0),
                    "proto" => proto = value.trim(),
                    "encoding" => encoding = value.trim(),
                    _ => {}
                }
            }
            let form = Self::ALL.into_iter().find(|form| match form {
                Self::Plain => kind.eq_ignore_ascii_case("text/plain"),
                Self::Open => kind.eq_ignore_ascii_case("application/openmetrics-text"),
                Self::Messages => {
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

    /// `None` where the form has no way to say it. As long as `before`, nearly always.
    fn write(self, snapshot: Arc<Snapshot>, cgroups: Option<&Reader>, before: usize) -> Option<Bytes> {
        let cgroups = cgroups.map(Reader::read).unwrap_or_default().into();
        let families = Families { snapshot, process: Process::now(), cgroups };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(families));
        let mut body = String::with_capacity(before + before / 64);
        match self {
            Self::Open => text::encode(&mut body, &registry).ok()?,
            Self::Plain => {
                let mut older = Older { text: body, line: String::new(), help: String::new() };
                text::encode_registry(&mut older, &registry).ok()?;
                body = older.text;
            }
            Self::Messages => return Some(prometheus_protobuf::encode_to_vec(&registry).ok()?.into()),
        }
        Some(body.into())
    }
}

/// The older format, where the name of a family of counters is that of its samples, and units are
/// not told: lines about families are other ones, and samples are the same.
///
/// It is written as it is told and not made of the whole of it: a second copy of nine megabytes
/// took a fifth of a scrape.
struct Older {
    text: String,
    /// About a family, as far as it is told.
    line: String,
    /// Comes before TYPE, which tells of what kind it is.
    help: String,
}

impl fmt::Write for Older {
    /// A line about a family begins with a piece of its own.
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        let is_about =
            piece.starts_with('#') && self.text.as_bytes().last().is_none_or(|last| *last == b'\n');
        if self.line.is_empty() && !is_about {
            self.text.push_str(piece);
            return Ok(());
        }
        self.line.push_str(piece);
        if self.line.ends_with('\n') {
            self.tell();
            self.line.clear();
        }
        Ok(())
    }
}

impl Older {
    fn tell(&mut self) {
        if self.line.starts_with("# HELP ") {
            mem::swap(&mut self.help, &mut self.line);
        } else if let Some(of) = self.line.strip_prefix("# TYPE ") {
            let (name, kind) = of.trim_end().rsplit_once(' ').unwrap_or((of, ""));
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                _ => ("", kind),
            };
            let said =
                self.help.strip_prefix("# HELP ").and_then(|help| help.strip_prefix(name)).unwrap_or("\n");
            self.text.push_str(&format!("# HELP {name}{suffix}{said}# TYPE {name}{suffix} {kind}\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    #[test]
    fn slow_readers_share_few_answers() {
        let mut given = Given::default();
        let mut ask = |number: usize| {
            given.0.iter_mut().for_each(|(at, _)| *at -= FRESH);
            given.again().unwrap_or_else(|| given.keep(Bytes::from(vec![0; number])))
        };
        let mut readers: Vec<_> = (1..=16).map(&mut ask).collect();
        let lengths: Vec<_> = readers.iter().map(Bytes::len).collect();
        assert_eq!(lengths[..4], [1, 2, 3, 3]);
        assert!(lengths[3..].iter().all(|length| *length == 3));
        // The first has read all of it: there is room for another.
        readers.remove(0);
        assert_eq!((ask(17).len(), ask(18).len()), (17, 17));
        readers.clear();
        assert_eq!(ask(19).len(), 19);
    }

    #[test]
    fn whoever_asks_has_what_is_liked_best() {
        let form = |accept: &str| Form::preferred([accept].into_iter());
        assert_eq!(Form::preferred(std::iter::empty()), Form::Plain);
        assert_eq!(form("*/*"), Form::Plain);
        assert_eq!(form("text/html, application/openmetrics-text"), Form::Open);
        // What Prometheus 2.42 sends, without and with native histograms.
        let text = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(form(text), Form::Open);
        let messages = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,*/*;q=0.1";
        assert_eq!(form(messages), Form::Messages);
        assert_eq!(form("application/openmetrics-text;q=0.2,text/plain;q=0.5"), Form::Plain);
        assert_eq!(form("application/vnd.google.protobuf;proto=other;encoding=delimited"), Form::Plain);
        assert_eq!(form("application/openmetrics-text;q=lots"), Form::Plain);
    }

    #[test]
    fn the_older_format_names_counters_as_their_samples() {
        let open = [
            ["# HELP ", "weir_disk_read", "_bytes", " Bytes.", "\n"].as_slice(),
            &["# TYPE weir_disk_read_bytes counter\n", "# UNIT weir_disk_read_bytes", " bytes\n"],
            &["weir_disk_read_bytes_total{", "disk", "=\"", "# TYPE", "\"} 1", "\n"],
            &["# HELP weir_build About.\n", "# TYPE weir_build info\n", "weir_build_info{version=\"1\"} 1\n"],
            &["# HELP weir_disk_size_bytes Size.\n", "# TYPE weir_disk_size_bytes gauge", "\n"],
        ];
        let expect = "# HELP weir_disk_read_bytes_total Bytes.\n# TYPE weir_disk_read_bytes_total counter\n\
                      weir_disk_read_bytes_total{disk=\"# TYPE\"} 1\n\
                      # HELP weir_build_info About.\n# TYPE weir_build_info gauge\nweir_build_info{version=\"1\"} 1\n\
                      # HELP weir_disk_size_bytes Size.\n# TYPE weir_disk_size_bytes gauge\n";
        let mut older = Older { text: String::new(), line: String::new(), help: String::new() };
        open.concat().into_iter().try_for_each(|piece| older.write_str(piece)).unwrap();
        assert_eq!(older.text, expect);
    }
}

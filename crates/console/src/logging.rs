//! The log, on standard error or in a file: standard output belongs to results.
//!
//! Where standard error is the journal's (`JOURNAL_STREAM`, systemd.exec(5)), a line begins with
//! its priority (sd-daemon(3)), and a line for people has no time: the journal has one.

mod file;
mod queue;

use std::{
    env,
    fmt::{self, Display},
    io::{IsTerminal as _, stderr},
    panic,
    path::Path,
    process,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use anyhow::Context as _;
use file::LogFile;
use nix::sys::stat::fstat;
pub use queue::{THREAD, flush};
use settings::{LogFormat, LogSettings};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

/// Starts the log for the rest of the process's life. Only the first call counts.
///
/// # Errors
/// The log's file cannot be opened, or the filter is not valid.
pub fn start(settings: &LogSettings) -> anyhow::Result<()> {
    if let Some(path) = &settings.file {
        drop(file::open(path).with_context(|| cannot_be_written(path))?);
    }
    let is_file = settings.file.is_some();
    let targets: Targets = settings.filter.parse().context("log")?;
    let format = settings.format;
    let log = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(move || LogFile(format))
        // To standard error, of which it would panic there.
        .log_internal_errors(false)
        .with_ansi(!is_file && stderr().is_terminal());
    // A second start, as in tests, leaves the first log in place.
    let started = match (format, !is_file && is_journal()) {
        (LogFormat::Text, false) => log.finish().with(Warnings).with(targets).try_init(),
        (LogFormat::Text, true) => {
            log.without_time().map_event_format(Prioritised).finish().with(Warnings).with(targets).try_init()
        }
        (LogFormat::Json, false) => {
            log.json().flatten_event(true).finish().with(Warnings).with(targets).try_init()
        }
        (LogFormat::Json, true) => {
            let log = log.json().flatten_event(true).map_event_format(Prioritised);
            log.finish().with(Warnings).with(targets).try_init()
        }
    };
    if started.is_ok() {
        flush_at_panic();
    }
    Ok(())
}

/// Has a panic write the lines that were logged before it: in a release, a panic ends the process
/// at once.
fn flush_at_panic() {
    let next = panic::take_hook();
    panic::set_hook(Box::new(move |information| {
        // A thread of the log would wait for itself.
        if thread::current().name() != Some(THREAD) {
            flush();
        }
        next(information);
    }));
}

/// Ends the process once the log is written, or cannot be written in time. Blocks.
pub fn exit(status: i32) -> ! {
    flush();
    process::exit(status)
}

fn cannot_be_written(path: &Path) -> String {
    format!(
        "log-file {}: cannot be written (name a file in a directory that weir may write to)",
        path.display()
    )
}

/// Opens the log's file again, if one is configured: it may have been renamed. If that fails, lines
/// still go to the old file, beginning with one that reports the failure. Returns false if another
/// call is still opening it, which then opens it once more. Blocks.
pub fn reopen() -> bool {
    file::reopen().unwrap_or_else(|(path, error)| {
        tracing::warn!("{}: {error}", cannot_be_written(&path));
        true
    })
}

/// How many warnings the log has had.
pub fn warnings() -> usize {
    WARNINGS.load(Relaxed)
}

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

/// Counts them.
struct Warnings;

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::WARN {
            WARNINGS.fetch_add(1, Relaxed);
        }
    }
}

/// Lines with their priority before them.
struct Prioritised<F>(F);

impl<S, N, F> FormatEvent<S, N> for Prioritised<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "{}", Priority::of(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

/// A priority of syslog(3), as the journal reads it before a line.
pub(crate) struct Priority(u8);

impl Priority {
    pub(crate) const ERROR: Self = Self(3);
    const WARNING: Self = Self(4);
    pub(crate) const NOTICE: Self = Self(5);

    fn of(level: Level) -> Self {
        match level {
            Level::ERROR => Self::ERROR,
            Level::WARN => Self::WARNING,
            Level::INFO => Self(6),
            Level::DEBUG | Level::TRACE => Self(7),
        }
    }
}

/// Nothing where nobody would read it as a priority.
impl Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_journal() { write!(f, "<{}>", self.0) } else { Ok(()) }
    }
}

/// Whether standard error is what the service manager has connected to the journal.
fn is_journal() -> bool {
    static IS_JOURNAL: OnceLock<bool> = OnceLock::new();
    *IS_JOURNAL.get_or_init(|| {
        let file = fstat(stderr()).ok();
        let number = file.map(|file| format!("{}:{}", file.st_dev, file.st_ino));
        number.is_some() && number == env::var("JOURNAL_STREAM").ok()
    })
}

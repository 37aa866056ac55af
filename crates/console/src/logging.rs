//! The log, on standard error or in a file. Standard output is for results only.
//!
//! If standard error is connected to the journal (`JOURNAL_STREAM`, systemd.exec(5)), each line
//! begins with its priority (sd-daemon(3)), and a text line has no time, because the journal adds
//! one.

mod file;
mod queue;

use std::{
    env,
    fmt::{self, Display, Write as _},
    io::{IsTerminal as _, stderr},
    panic,
    path::Path,
    process,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use anyhow::Context as _;
use file::LogFile;
use nix::sys::stat::fstat;
pub use queue::{THREAD, flush};
use settings::{LogFormat, LogSettings};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

/// Starts the log for the life of the process. Later calls have no effect on the format and the
/// filter.
///
/// # Errors
/// Fails if the log file cannot be opened or the filter is invalid.
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
        // The subscriber would report a failed write on standard error, and panic if that fails
        // too.
        .log_internal_errors(false)
        .with_ansi(!is_file && stderr().is_terminal());
    // A second start, as in tests, fails and leaves the first log in place.
    let started = match (format, !is_file && is_journal()) {
        (LogFormat::Text, false) => log.finish().with(WarningCounter).with(targets).try_init(),
        (LogFormat::Text, true) => log
            .without_time()
            .map_event_format(PriorityFormat)
            .finish()
            .with(WarningCounter)
            .with(targets)
            .try_init(),
        (LogFormat::Json, false) => {
            log.json().flatten_event(true).finish().with(WarningCounter).with(targets).try_init()
        }
        (LogFormat::Json, true) => {
            let log = log.json().flatten_event(true).map_event_format(PriorityFormat);
            log.finish().with(WarningCounter).with(targets).try_init()
        }
    };
    if started.is_ok() {
        flush_at_panic();
    }
    Ok(())
}

/// Makes a panic flush the log first: release builds abort on a panic, and queued lines would be
/// lost.
fn flush_at_panic() {
    let next = panic::take_hook();
    panic::set_hook(Box::new(move |information| {
        // The log's thread would wait for itself.
        if thread::current().name() != Some(THREAD) {
            flush();
        }
        next(information);
    }));
}

/// Flushes the log, for a bounded time, and ends the process. Blocks.
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

/// Opens the log file again, if one is configured, because it may have been renamed. On failure,
/// lines still go to the old file, beginning with one that reports the failure. Returns false if
/// another call is in progress; that call then opens the file once more. Blocks.
pub fn reopen() -> bool {
    file::reopen().unwrap_or_else(|(path, error)| {
        tracing::warn!("{}: {error}", cannot_be_written(&path));
        true
    })
}

/// Number of warnings logged since the start.
pub fn warnings() -> usize {
    WARNINGS.load(Relaxed)
}

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

/// Bound of the kept warnings.
const MAX_KEPT_WARNINGS: usize = 1000;

/// Texts of the warnings since `start_keeping_warnings`; `None` before that.
static KEPT: Mutex<Option<Vec<String>>> = Mutex::new(None);

/// Keeps the texts of the first 1,000 warnings from now on, for [`kept_warnings`].
pub fn start_keeping_warnings() {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
}

/// Texts of the kept warnings, each followed by its fields.
pub fn kept_warnings() -> Vec<String> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
}

/// Text of a logged warning.
#[derive(Default)]
struct WarningText {
    message: String,
    fields: String,
}

impl Visit for WarningText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a `String` cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Counts warnings, and keeps their texts after `start_keeping_warnings`.
struct WarningCounter;

impl<S: Subscriber> Layer<S> for WarningCounter {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::WARN {
            WARNINGS.fetch_add(1, Relaxed);
            let mut warnings = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(warnings) = warnings.as_mut().filter(|kept| kept.len() < MAX_KEPT_WARNINGS) {
                let mut text = WarningText::default();
                event.record(&mut text);
                warnings.push(text.message + &text.fields);
            }
        }
    }
}

// Format with the journal's priority at the start of the line.
struct PriorityFormat<F>(F);

impl<S, N, F> FormatEvent<S, N> for PriorityFormat<F>
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
        write!(writer, "{}", JournalPriority::of(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

// Syslog priority of a line (sd-daemon(3)).
pub(crate) struct JournalPriority(u8);

impl JournalPriority {
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

/// Prints nothing unless the journal reads standard error.
impl Display for JournalPriority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_journal() { write!(f, "<{}>", self.0) } else { Ok(()) }
    }
}

/// True if standard error is the stream that the service manager connected to the journal:
/// `JOURNAL_STREAM` holds its device and inode (systemd.exec(5)).
fn is_journal() -> bool {
    static IS_JOURNAL: OnceLock<bool> = OnceLock::new();
    *IS_JOURNAL.get_or_init(|| {
        let file = fstat(stderr()).ok();
        let number = file.map(|file| format!("{}:{}", file.st_dev, file.st_ino));
        number.is_some() && number == env::var("JOURNAL_STREAM").ok()
    })
}

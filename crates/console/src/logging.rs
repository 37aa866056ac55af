//! The log, on standard error: standard output belongs to results.

use std::io::{IsTerminal as _, stderr};

use settings::{LogFormat, LogSettings};
use tracing_subscriber::EnvFilter;

/// Starts the log for the rest of the process's life. Only the first call counts.
pub fn start(settings: &LogSettings) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&settings.filter))
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal());
    // A second start, as in tests, leaves the first log in place.
    let _ = match settings.format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}

//! The log: what is said, to whom, in which form. It goes to standard error, where systemd and a terminal find it.
//!
//! Never to standard output, which belongs to results.

use std::io::{IsTerminal as _, stderr};

use tracing_subscriber::EnvFilter;

use crate::plan::{LogFormat, LogSettings};

/// A level, or a filter such as `info,export::nbd=debug`.
///
/// # Errors
/// The reason, to follow the value in a message.
pub(crate) fn filter(text: &str) -> Result<String, String> {
    // EnvFilter takes the empty string for "errors only", and any word for the name of a module.
    let level = |word: &str| word.parse::<tracing::metadata::LevelFilter>().is_ok();
    let plausible =
        |directive: &str| level(directive) || directive.contains(['=', '[']) || directive.contains("::");
    if !text.is_empty()
        && text.split(',').all(|directive| !directive.is_empty() && plausible(directive))
        && EnvFilter::try_new(text).is_ok()
    {
        return Ok(text.to_owned());
    }
    Err("is not a log filter; write off, error, warn, info, debug or trace, or for a part MODULE=LEVEL, separated by commas".to_owned())
}

/// Starts the log for the rest of the process's life. Only the first call counts.
pub(crate) fn start(settings: &LogSettings) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_levels_or_levels_of_modules() {
        for text in ["info", "off", "DEBUG", "warn,block=trace", "export::nbd=debug,info"] {
            assert_eq!(filter(text), Ok(text.to_owned()));
        }
        for text in ["", "loud", "info,", "block=loud", "a=b=c"] {
            assert!(filter(text).unwrap_err().starts_with("is not a log filter"), "{text}");
        }
    }
}

//! Diagnostics of `weir check-config --json`.

use std::path::PathBuf;

use api::{Diagnostic, Severity};
use console::{CommandFailure, logging};
use control::listen::AddressConflictRule;
use settings::{ConfigError, DesiredState, Origin, ParsedConfig};

/// Returns all errors, then all warnings.
///
/// # Errors
/// Fails if the check cannot be completed.
pub(super) fn collect_diagnostics(
    parsed: ParsedConfig,
    plan: Result<DesiredState, Vec<ConfigError>>,
    file: PathBuf,
) -> Result<Vec<Diagnostic>, CommandFailure> {
    let name = file.display().to_string();
    let plan = match plan {
        Ok(plan) => plan,
        Err(all) => return Ok(all.into_iter().map(|wrong| error_diagnostic(&wrong.into(), &name)).collect()),
    };
    logging::start_keeping_warnings();
    let errors = super::find_problems(parsed, plan, AddressConflictRule::Tolerated, Some(file))?;
    let errors = errors.iter().map(|error| error_diagnostic(error, &name));
    let warnings = logging::kept_warnings();
    Ok(errors.chain(warnings.iter().map(|text| warning_diagnostic(text, &name))).collect())
}

fn error_diagnostic(error: &anyhow::Error, file: &str) -> Diagnostic {
    let origin =
        error.downcast_ref::<Origin>().or_else(|| Some(error.downcast_ref::<ConfigError>()?.origin()));
    let text = console::error_text(error);
    let message = origin.and_then(|origin| text.strip_prefix(&format!("{origin}: ")).map(str::to_owned));
    let at = origin.and_then(Origin::in_file);
    Diagnostic {
        severity: Severity::Error,
        file: file.to_owned(),
        line: at.map(|(_, line, _)| line as u64),
        key: at.map(|(_, _, key)| key.to_owned()),
        message: message.unwrap_or(text),
    }
}

/// Diagnostic of a warning. The text begins with the file and the line if the warning concerns a
/// line.
fn warning_diagnostic(text: &str, file: &str) -> Diagnostic {
    let tail = text.strip_prefix(file).and_then(|rest| rest.strip_prefix(':'));
    let at = tail.and_then(|rest| rest.split_once(": "));
    let line = at.and_then(|(line, _)| line.parse().ok());
    let key = at.filter(|_| line.is_some()).and_then(|(_, rest)| rest.split_once(" = "));
    Diagnostic {
        severity: Severity::Warning,
        file: file.to_owned(),
        line,
        key: key.map(|(key, _)| key.to_owned()),
        message: text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diagnostic_has_line_and_key_as_separate_members() {
        let error = anyhow::anyhow!("no such file");
        let found = error_diagnostic(&error, "f");
        assert_eq!((found.line, found.key, &*found.message), (None, None, "no such file"));
        let found = warning_diagnostic("f:3: disk.a.image = \"b\": no answer", "f");
        assert_eq!((found.line, found.key.as_deref()), (Some(3), Some("disk.a.image")));
        let found = warning_diagnostic("no disk is in this group name=\"g\"", "f");
        assert_eq!((found.line, found.key), (None, None));
    }
}

//! Content, form and destination of the log.

use std::path::PathBuf;

use tracing_subscriber::filter::Targets;

/// Settings of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// A level, or levels by module; valid for [`Targets`].
    pub filter: String,
    /// Format of a line.
    pub format: LogFormat,
    /// The file that lines are appended to; `None` is standard error.
    pub file: Option<PathBuf>,
}

/// Format of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text, for terminals and journals.
    #[default]
    Text,
    /// One JSON object in each line.
    Json,
}

impl std::fmt::Display for LogFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("is not a log format (text, json)".to_owned()),
        }
    }
}

/// Crates of the program. In a filter, `weir` stands for all of them.
const MODULES: [&str; 25] = [
    "weir",
    "container",
    "daemon",
    "weir_http",
    "control",
    "cluster",
    "sandbox",
    "export",
    "virtio",
    "jobs",
    "block",
    "image",
    "storage",
    "nbd",
    "tls",
    "reactor",
    "cgroup",
    "image_tool",
    "lab",
    "simulator",
    "recording",
    "settings",
    "api",
    "console",
    "policy",
];

/// Parses a level, or a filter such as `info,export::nbd=debug`; `weir=debug` applies to all
/// crates.
pub fn filter(text: &str) -> Result<String, String> {
    let directives = text.split(',').flat_map(|directive| match directive.strip_prefix("weir=") {
        // Targets are crate names, so `weir` alone would match only the binary.
        Some(level) => MODULES.map(|module| format!("{module}={level}")).to_vec(),
        None => vec![directive.to_owned()],
    });
    checked(&directives.collect::<Vec<_>>().join(","))
}

fn checked(text: &str) -> Result<String, String> {
    // `Targets` accepts the empty string, and any word as the name of a module.
    let level = |name: &str| name.parse::<tracing::metadata::LevelFilter>().is_ok();
    if let Some(unknown) = text.split(',').find_map(unknown_module) {
        let names = MODULES.join(", ");
        return Err(format!(
            "names the unknown module {unknown:?}; known are {names}, and their submodules, such \
             as export::nbd"
        ));
    }
    let plausible = |directive: &str| level(directive) || directive.contains('=') || directive.contains("::");
    if !text.is_empty()
        && text.split(',').all(|directive| !directive.is_empty() && plausible(directive))
        && text.parse::<Targets>().is_ok()
    {
        return Ok(text.to_owned());
    }
    Err("is not a log filter; write off, error, warn, info, debug or trace, or MODULE=LEVEL for one \
         module, separated by commas"
        .to_owned())
}

/// First part of a directive's module, unless it is a crate of the program: such a directive would
/// have no effect.
fn unknown_module(directive: &str) -> Option<&str> {
    let (module, level) = directive.split_once('=')?;
    let first = module.split("::").next()?;
    let is_name =
        !first.is_empty() && first.chars().all(|character| character.is_alphanumeric() || character == '_');
    (is_name && !level.contains('=') && !MODULES.contains(&first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_can_name_each_crate() {
        let dependencies =
            include_str!("../../../Cargo.toml").split("[workspace.dependencies]").nth(1).unwrap();
        let crates = dependencies.lines().filter(|line| line.contains("path = \"crates/"));
        let mut crates: Vec<_> = crates.filter_map(|line| line.split(' ').next()).chain(["weir"]).collect();
        let mut modules = MODULES;
        crates.sort_unstable();
        modules.sort_unstable();
        assert_eq!(crates, modules);
    }

    #[test]
    fn filters_are_levels_or_levels_of_modules() {
        for text in ["info", "off", "DEBUG", "warn,block=trace", "export::nbd=debug,info"] {
            assert_eq!(filter(text), Ok(text.to_owned()));
        }
        let all = filter("off,weir=info").unwrap();
        assert!(all.starts_with("off,weir=info,container=info,") && all.ends_with(",policy=info"), "{all}");
        for text in ["nosuch=debug", "info,weird::limits=debug"] {
            let error = filter(text).unwrap_err();
            assert!(
                error.contains("\"nosuch\"; known are weir, container,") || error.contains("\"weird\";"),
                "{error}"
            );
        }
        for text in ["", "loud", "weir=loud", "info,", "block=loud", "a=b=c"] {
            assert!(filter(text).unwrap_err().starts_with("is not a log filter"), "{text}");
        }
    }
}

//! Shell completion: the command line from its definition, and values that can be enumerated:
//! paths, modes, formats, and the disks and groups of the running daemon.
//!
//! A shell requests completions by running the program with [`VARIABLE`] set; the shell's script is
//! written by `generate`. The daemon is that of `WEIR_QMP`, else the default one.
//!
//! Never reports an error: without a response in time there are no names. Never changes anything.

use std::time::Duration;

use block::disk::DetectZeroes;
use clap::{Arg, Command, ValueHint};
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate};
use policy::throttle::LimitSetting;
use storage::{CacheMode, ImageFormat};

use crate::{
    client::{ControlAddress, ControlClient, report::DaemonReport},
    jobs,
};

/// Environment variable with the name of the shell.
pub(crate) const VARIABLE: &str = "WEIR_COMPLETE";
/// Deadline of the daemon: completion runs while the user waits for a key press.
const TIMEOUT: Duration = Duration::from_millis(500);

/// If a shell requests completions, prints them and exits.
pub(crate) fn complete(command: fn() -> Command) {
    // Does nothing unless the shell's script has set the variable.
    CompleteEnv::with_factory(move || with_shown_limits(command())).var(VARIABLE).complete();
}

/// Shows the limits, which the help hides from its list.
fn with_shown_limits(command: Command) -> Command {
    let is_limit = |argument: &Arg| LimitSetting::from_name(argument.get_id().as_str()).is_some();
    command
        .mut_args(|argument| if is_limit(&argument) { argument.hide(false) } else { argument })
        .mut_subcommands(with_shown_limits)
}

/// Adds the possible values to the options of `command` and of all commands below it.
pub(crate) fn with_values(command: Command) -> Command {
    with_values_below("", command)
}

fn with_values_below(parent: &str, command: Command) -> Command {
    let name = command.get_name().to_owned();
    command
        .mut_args(|argument| with_value([parent, &name], argument))
        .mut_subcommands(|command| with_values_below(&name, command))
}

/// Adds the possible values of one option, chosen by its names and the last two words of its
/// command.
fn with_value(command: [&str; 2], argument: Arg) -> Arg {
    // clap gives a flag a value name too, derived from the flag's own name.
    if !argument.get_action().takes_values() {
        return argument;
    }
    let long = argument.get_long().map(str::to_owned);
    let value = argument.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    match (long.as_deref(), value.as_deref().unwrap_or_default()) {
        (Some("cache"), "MODE") => argument.add(candidates(CacheMode::ALL.map(CacheMode::name))),
        // Trace formats: the definition lists all of them.
        (Some("format"), "FORMAT") if !argument.get_possible_values().is_empty() => argument,
        (Some("format"), "FORMAT") => {
            argument.add(candidates([ImageFormat::Raw, ImageFormat::Qcow2].map(ImageFormat::name)))
        }
        (Some("prefetch"), "MODE") => argument.add(candidates(["on", "off", "auto"])),
        (None, "MODE") if command[1] == "prefetch" => argument.add(candidates(["on", "off", "auto"])),
        (Some("discard"), "MODE") => argument.add(candidates(["unmap", "ignore"])),
        (Some("detect-zeroes"), "MODE") => {
            argument.add(candidates(DetectZeroes::ALL.map(DetectZeroes::name)))
        }
        (Some("sandbox"), "MODE") => argument.add(candidates(["on", "require", "off"])),
        (Some("tls"), "MODE") => argument.add(candidates(["off", "on", "required"])),
        (Some("log-format"), "FORMAT") => argument.add(candidates(["text", "json"])),
        (Some("on-read-error"), "POLICY") => argument.add(candidates(["report", "stop"])),
        (Some("on-write-error"), "POLICY") => argument.add(candidates(["report", "stop", "enospc"])),
        (None, "NAME") if command == ["disk", "remove"] => {
            argument.add(ArgValueCandidates::new(|| daemon_names(disks)))
        }
        (None, "NAME") if command == ["group", "remove"] => {
            argument.add(ArgValueCandidates::new(|| daemon_names(groups)))
        }
        (None, "HOST") if command == ["cluster", "forget"] => {
            argument.add(ArgValueCandidates::new(absent_hosts))
        }
        (None, "JOB") => argument.add(ArgValueCandidates::new(job_ids)),
        // A new name, which no existing one completes.
        (None, "NAME") if command[1] == "add" => argument,
        (_, "GROUP") => argument.add(ArgValueCandidates::new(|| daemon_names(groups))),
        (_, "DISK") => argument.add(ArgValueCandidates::new(|| daemon_names(disks))),
        (_, "DISK|GROUP") | (None, "NAME") => {
            argument.add(ArgValueCandidates::new(|| daemon_names(disks_and_groups)))
        }
        (_, value) if value.starts_with("DIR") => argument.value_hint(ValueHint::DirPath),
        (_, value) if ["IMAGE", "FILE", "SOURCE", "TRACE"].iter().any(|path| value.starts_with(path)) => {
            argument.value_hint(ValueHint::AnyPath)
        }
        _ => argument,
    }
}

fn candidates<const N: usize>(values: [&'static str; N]) -> ArgValueCandidates {
    ArgValueCandidates::new(move || values.map(CompletionCandidate::new).into())
}

/// Names from the running daemon.
fn daemon_names(list: fn(&DaemonReport) -> Vec<CompletionCandidate>) -> Vec<CompletionCandidate> {
    // Errors are dropped: a message would appear in the middle of the user's command line.
    let status = ControlAddress::choose(None).ok().and_then(|target| {
        let mut client = ControlClient::connect_with(&target, TIMEOUT).ok()?;
        client.status().ok()
    });
    status.map(|report| list(&report)).unwrap_or_default()
}

/// Ids of the daemon's jobs.
fn job_ids() -> Vec<CompletionCandidate> {
    let jobs = ControlAddress::choose(None).ok().and_then(|target| {
        let mut client = ControlClient::connect_with(&target, TIMEOUT).ok()?;
        jobs::all(&mut client).ok()
    });
    jobs.unwrap_or_default().into_iter().map(|job| CompletionCandidate::new(job.id)).collect()
}

/// Hosts of the daemon's cluster that are absent.
fn absent_hosts() -> Vec<CompletionCandidate> {
    let report = ControlAddress::choose(None).ok().and_then(|target| {
        let mut client = ControlClient::connect_with(&target, TIMEOUT).ok()?;
        client.cluster().ok()
    });
    // Hosts that are present are not candidates for `cluster forget`.
    let hosts = report.into_iter().flat_map(|report| report.hosts);
    hosts.filter(|host| !host.present).map(|host| CompletionCandidate::new(host.name)).collect()
}

fn disks(report: &DaemonReport) -> Vec<CompletionCandidate> {
    let disk = |(name, image): (&String, &String)| CompletionCandidate::new(name).help(Some(image.into()));
    report.disks.iter().map(|found| disk((&found.name, &found.image))).collect()
}

fn groups(report: &DaemonReport) -> Vec<CompletionCandidate> {
    let group = |name: &String| CompletionCandidate::new(name).help(Some("a group".into()));
    report.groups.iter().map(|found| group(&found.name)).collect()
}

fn disks_and_groups(report: &DaemonReport) -> Vec<CompletionCandidate> {
    disks(report).into_iter().chain(groups(report)).collect()
}

#[cfg(test)]
mod tests {
    use clap_complete::engine;

    use super::with_shown_limits;
    use crate::cli::Cli;

    /// Completions of the last word of a line.
    fn offered(line: &str) -> Vec<String> {
        let arguments: Vec<_> = line.split(' ').map(Into::into).collect();
        let last = arguments.len() - 1;
        let here = std::env::current_dir().unwrap();
        let found =
            engine::complete(&mut with_shown_limits(Cli::full_command()), arguments, last, Some(&here))
                .unwrap();
        found.iter().map(|candidate| candidate.get_value().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn known_words_are_completed() {
        assert_eq!(offered("weir serve --cache w"), ["writeback", "writethrough"]);
        assert_eq!(offered("weir serve -f "), ["raw", "qcow2"]);
        assert_eq!(offered("weir trace info --format fi"), ["fio-v2", "fio-v3"]);
        assert_eq!(offered("weir image comp"), ["compare"]);
        assert_eq!(offered("weir serve --sandbox "), ["on", "require", "off"]);
        assert_eq!(offered("weir serve --tls re"), ["required"]);
        assert_eq!(offered("weir prefetch vm1 o"), ["on", "off"]);
        assert_eq!(offered("weir disk add vm1 --on-write-error e"), ["enospc"]);
        assert_eq!(offered("weir throttle vm1 --iops-total-max-"), ["--iops-total-max-length"]);
        let limits = offered("weir serve --iops-");
        assert!(
            ["--iops-total", "--iops-reservation"].iter().all(|name| limits.contains(&(*name).to_owned()))
        );
        let commands = offered("weir ");
        assert!(commands.contains(&"docker-plugin".to_owned()), "{commands:?}");
        assert!(!commands.contains(&"generate".to_owned()), "it is a hidden command: {commands:?}");
    }

    #[test]
    fn paths_are_completed() {
        for line in ["weir serve src/li", "weir image info src/li", "weir serve --config src/li"] {
            assert_eq!(offered(line), ["src/lib.rs"], "{line}");
        }
        assert_eq!(offered("weir probe --state src/clie"), ["src/client/"]);
    }
}

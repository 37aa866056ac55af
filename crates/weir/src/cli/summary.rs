//! `weir serve -h`: the options that most callers need, on two screens of 24 lines. `--help` has
//! all options, with more examples.

use clap::{Arg, Command};

/// Long options of `weir serve -h`, each with a line of help. The first line is the positional
/// argument's.
const SERVE: &[(&str, &str)] = &[
    ("", "File, device, memory:SIZE, null:SIZE, rbd:…, nbd://…"),
    ("config", "Serve the disks of this file"),
    ("check", "Check the config; serve nothing"),
    ("takeover", "Upgrade: replace the running daemon"),
    ("format", "raw or qcow2 [default: probed if safe]"),
    ("cache", "QEMU's cache mode [default: writeback]"),
    ("read-only", "Reject writes"),
    ("name", "Name of the disk, once for each IMAGE"),
    ("group", "Group of the disks, which share its limits"),
    ("prefetch", "Read-ahead: on, off or auto [default: auto]"),
    ("bps-total", "Bytes per second of reads and writes"),
    ("iops-total", "Operations per second of reads and writes"),
    ("weight", "Weight in the group [default: 100]"),
    ("watermark", "Utilization below which limits are lifted"),
    ("nbd", "Serve NBD [default: localhost:10809]"),
    ("vhost-user-blk", "Serve a virtual machine"),
    ("ublk", "Serve a block device, /dev/ublkbN"),
    ("fuse", "Serve the disk as a file"),
    ("qmp", "Control socket [default: /run/weir/qmp.sock]"),
    ("metrics", "Metrics for Prometheus"),
    ("http", "Page and JSON API"),
    ("tls", "off, on or required [default: off]"),
    ("tls-certificates", "Directory of certificates"),
    ("memory", "Memory for data, at least 128M"),
    ("user", "User to switch to after opening files"),
    ("daemonize", "Continue in the background"),
    ("log", "off, error, warn, info, debug or trace"),
    ("help", "Print this summary; --help has all options"),
];

/// Text that precedes the exit status.
const BELOW: &str = "\
Limits: --{bps,iops}-{total,read,write}, each with -max (burst rate) and -max-length (seconds).

Examples:
  weir serve vm1.raw --cache none --nbd unix:/run/vm1.sock --iops-total 1000
  weir serve a.raw b.raw --group tenant --bps-total 100M
  weir serve --config /etc/weir.toml";

/// True if the words of a command line request `weir serve -h`.
pub(super) fn is_requested(arguments: &[std::ffi::OsString]) -> bool {
    let options = arguments.iter().skip(2).take_while(|argument| *argument != "--");
    arguments.get(1).is_some_and(|argument| argument == "serve")
        && options.into_iter().any(|word| word == "-h")
}

/// `command` with the summary in place of the help of `weir serve`.
pub(super) fn with_summary(command: Command) -> Command {
    command.mut_subcommand("serve", |serve| {
        let help = Arg::new("help").short('h').long("help").action(clap::ArgAction::Help);
        serve.disable_help_flag(true).arg(help).mut_args(shortened).after_help(BELOW)
    })
}

fn shortened(arg: Arg) -> Arg {
    let long = arg.get_long().unwrap_or_default().to_owned();
    match SERVE.iter().find(|(option, _)| *option == long) {
        Some((_, help)) => without_keys(arg.help(*help).help_heading(None::<&str>).hide(false)),
        None => arg.hide(true),
    }
}

/// Values that keys can follow, after a comma.
const WITH_KEYS: [&str; 4] = ["ADDRESS", "FILE", "N", "unix:PATH"];

/// `arg` whose value does not mention the keys.
fn without_keys(arg: Arg) -> Arg {
    let shown = arg.get_value_names().and_then(|names| names.first()?.strip_suffix("[,…]"));
    match WITH_KEYS.into_iter().find(|value| shown == Some(value)) {
        Some(value) => arg.value_name(value),
        None => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;

    /// Lines of two screens of the smallest usual terminal.
    const TWO_SCREENS: usize = 48;

    #[test]
    fn the_summary_fits_on_two_screens_and_names_options_that_exist() {
        for columns in [80, 100] {
            let mut command = with_summary(Cli::full_command()).term_width(columns);
            command.build();
            let serve = command.find_subcommand("serve").expect("it is there").clone();
            let help = serve.clone().render_help().to_string();
            let lines = help.lines().count();
            assert!(lines <= TWO_SCREENS, "{lines} lines at {columns} columns:\n{help}");
            for (long, text) in SERVE {
                let exists = serve.get_arguments().any(|arg| arg.get_long().unwrap_or_default() == *long);
                assert!(exists && help.contains(long), "--{long}: {text}\n{help}");
            }
        }
    }

    #[test]
    fn the_short_flag_of_serve_alone_asks_for_the_summary() {
        let is_summary = |line: &str| is_requested(&line.split(' ').map(Into::into).collect::<Vec<_>>());
        assert!(is_summary("weir serve -h") && is_summary("weir serve vm1.raw -h"));
        for line in ["weir serve --help", "weir status -h", "weir serve -- -h", "weir -h", "weir"] {
            assert!(!is_summary(line), "{line}");
        }
    }
}

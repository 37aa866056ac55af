//! Rules that hold for the options and the help of all commands. They are checked on the command
//! tree itself, so that a new command or option cannot be forgotten.

use std::collections::BTreeSet;

use clap::{Arg, ArgAction, Command, builder::ValueParser};

use super::Cli;

/// Options that stay in force beside `--config`, by command. Each of these is read by its command
/// when a config file is given; every other option of the command must be rejected together with
/// `--config`. Options of the whole command line (`--help`, `--version`) are omitted.
const BESIDE_CONFIG: &[(&str, &[&str])] = &[
    (
        "serve",
        &[
            "allow",
            "blockdev",
            "cgroup-limits",
            "chardev",
            "check",
            "control",
            "daemonize",
            "deny",
            "exit-when-idle",
            "export",
            "http",
            "http-name",
            "http-token-file",
            "image-root",
            "log",
            "log-file",
            "log-format",
            "max-connections",
            "max-connections-per-address",
            "memory",
            "metrics",
            "monitor",
            "nbd",
            "nbd-server",
            "no-control",
            "object",
            "on-event",
            "pid-file",
            "poll",
            "qmp",
            "record",
            "sandbox",
            "socket-mode",
            "socket-owner",
            "state",
            "takeover",
            "tls",
            "tls-authz",
            "tls-certificates",
            "tls-psk",
            "tls-verify-peer",
            "user",
            "workers",
        ],
    ),
    ("verify", &["for", "json", "latency-p99", "qmp", "wait-p99"]),
    (
        "simulate",
        &[
            "absolute-time",
            "columns",
            "device",
            "events",
            "format",
            "json",
            "p99",
            "p99-of",
            "report",
            "result",
            "seed",
            "state",
            "sweep",
            "sweep-of",
            "threads",
            "window",
            "workload",
        ],
    ),
    ("report", &["charts", "report"]),
    (
        "advise",
        &[
            "absolute-time",
            "columns",
            "device",
            "for",
            "format",
            "json",
            "keep",
            "over",
            "state",
            "window",
            "write-config",
        ],
    ),
];

/// The complete command tree, after clap has resolved it as for parsing.
fn built() -> Command {
    let mut command = Cli::full_command();
    command.build();
    command
}

/// Calls `check` with each command that can be run itself, and with its words.
fn each_command(command: &Command, path: &[&str], check: &mut impl FnMut(&Command, &[&str])) {
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        let path = [path, &[below.get_name()]].concat();
        if !below.is_subcommand_required_set() {
            check(below, &path);
        }
        each_command(below, &path, check);
    }
}

fn long_options(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_general = |arg: &Arg| matches!(arg.get_id().as_str(), "help" | "version");
    command.get_arguments().filter(move |arg| arg.get_long().is_some() && !is_general(arg))
}

/// A command that takes its disks from a config file either rejects an option beside `--config`, or
/// the option is listed as one that the command reads then.
#[test]
fn every_option_beside_a_config_file_is_in_force_or_refused() {
    let mut seen = BTreeSet::new();
    each_command(&built(), &[], &mut |command, path| {
        let Some(config) = long_options(command).find(|arg| arg.get_long() == Some("config")) else { return };
        // With --save, the file is the target of the change and the options are the change.
        if long_options(command).any(|arg| arg.get_long() == Some("save")) {
            return;
        }
        let name = path.join(" ");
        let listed = BESIDE_CONFIG.iter().find(|(known, _)| *known == name);
        let (_, listed) = listed.unwrap_or_else(|| panic!("`{name}` has --config: list its options here"));
        seen.insert(name.clone());
        let refused: BTreeSet<_> =
            command.get_arg_conflicts_with(config).into_iter().map(Arg::get_id).collect();
        for arg in long_options(command).filter(|arg| arg.get_id() != config.get_id()) {
            let long = arg.get_long().expect("a long option");
            let is_refused =
                refused.contains(arg.get_id()) || command.get_arg_conflicts_with(arg).contains(&config);
            assert!(
                is_refused != listed.contains(&long),
                "weir {name} --config FILE --{long}: must conflict with --config or be listed, not both"
            );
        }
        for long in *listed {
            let exists = long_options(command).any(|arg| arg.get_long() == Some(long));
            assert!(exists, "weir {name} has no --{long}");
        }
    });
    assert_eq!(seen.len(), BESIDE_CONFIG.len(), "each listed command has --config");
}

/// The command tree without value parsers: only the positions of arguments are checked.
fn without_parsers(command: Command) -> Command {
    let plain = |arg: Arg| {
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        if takes_value { arg.value_parser(ValueParser::os_string()) } else { arg }
    };
    command.mut_args(plain).mut_subcommands(without_parsers)
}

/// An option in the form of the command line, with a value if it takes one.
fn written(arg: &Arg) -> String {
    let long = arg.get_long().expect("a long option");
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    if takes_value { format!("--{long}=1") } else { format!("--{long}") }
}

/// Options are accepted before, between and after a command's arguments, as in GNU programs. After
/// the first word of a command to run (`weir cgroup run -- COMMAND`), options belong to that
/// command.
#[test]
fn options_are_accepted_at_any_position() {
    let plain = without_parsers(Cli::full_command());
    let parses = |arguments: &[String]| plain.clone().try_get_matches_from(arguments).is_ok();
    let (mut tried, mut refused) = (0, Vec::new());
    each_command(&built(), &["weir"], &mut |command, path| {
        if command.get_positionals().any(Arg::is_trailing_var_arg_set) {
            return;
        }
        let positionals = command.get_positionals().flat_map(|arg| {
            let range = arg.get_num_args().unwrap_or_default();
            (0..range.min_values().max(1).max(range.max_values().min(3))).map(|number| number.to_string())
        });
        let positionals: Vec<String> = positionals.collect();
        let required = long_options(command).filter(|arg| arg.is_required_set()).map(written);
        let head: Vec<String> = path.iter().map(|name| (*name).to_owned()).chain(required).collect();
        for option in long_options(command).filter(|arg| !arg.is_required_set()).map(written) {
            // Some options exclude some of the arguments.
            let fewest = (0..=positionals.len()).rev().map(|count| &positionals[..count]);
            let with = |option_at: usize, positionals: &[String]| {
                let (before, after) = positionals.split_at(option_at);
                [&head, before, std::slice::from_ref(&option), after].concat()
            };
            let Some(fitting) = fewest.into_iter().find(|candidate| parses(&with(0, candidate))) else {
                continue;
            };
            tried += usize::from(!fitting.is_empty());
            let lines = (0..=fitting.len()).map(|at| with(at, fitting));
            refused.extend(lines.filter(|arguments| !parses(arguments)).map(|words| words.join(" ")));
        }
    });
    assert!(tried > 300, "only {tried} options have been tried");
    assert!(refused.is_empty(), "refused:\n{}", refused.join("\n"));
}

/// Columns of a terminal for which help is written.
const COLUMNS: usize = 100;

/// Words of one line of an example in a help text, without the shell's redirections and comments.
/// `None` if the line does not run `weir`.
fn example(line: &str) -> Option<Vec<String>> {
    let line = line.strip_prefix("  ").filter(|line| line.starts_with("weir "))?;
    let (mut tokens, mut quote, mut token) = (Vec::new(), None, None::<String>);
    for character in line.chars() {
        match (quote, character) {
            (Some(open), _) if open == character => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                token.get_or_insert_default();
            }
            (None, ' ') => tokens.extend(token.take()),
            (None, '|' | '>' | '<' | '&' | ';' | '#') => break,
            _ => token.get_or_insert_default().push(character),
        }
    }
    tokens.extend(token);
    Some(tokens)
}

/// True if an example is one of the command: it has the names of the command in this order, perhaps
/// with an argument between them (`weir bitmap DISK add`).
fn is_example_of(tokens: &[String], name: &str) -> bool {
    let mut rest = tokens.iter();
    name.split(' ').all(|word| rest.any(|token| token == word))
}

/// Adds the examples in the help of all commands.
fn add_examples(command: &Command, examples: &mut Vec<Vec<String>>) {
    // From the source text: the rendered help has wrapped lines.
    let below = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (_, text) = below.split_once("Examples:\n").unwrap_or_default();
    examples.extend(text.replace("\\\n", " ").lines().filter_map(example));
    command.get_subcommands().for_each(|below| add_examples(below, examples));
}

/// The help of each command has an example, which the command accepts, and no line beyond the
/// terminal's width.
#[test]
fn help_has_examples_that_parse_and_fits_the_terminal() {
    let mut command = Cli::full_command().term_width(COLUMNS);
    command.build();
    let plain = without_parsers(Cli::full_command());
    let (mut complaints, mut names, mut shown) = (Vec::new(), Vec::new(), Vec::new());
    each_command(&command, &["weir"], &mut |command, path| {
        if command.is_hide_set() {
            return;
        }
        let name = path.join(" ");
        let help = command.clone().render_long_help().to_string();
        // clap does not wrap the usage.
        let lines = help.lines().filter(|line| !line.starts_with("Usage: "));
        let wide = lines.filter(|line| line.chars().count() > COLUMNS);
        complaints.extend(wide.map(|line| format!("{name} --help: more than {COLUMNS} columns: {line}")));
        names.push(name);
    });
    add_examples(&command, &mut shown);
    for tokens in &shown {
        if let Err(error) = plain.clone().try_get_matches_from(tokens) {
            complaints.push(format!("{}: {error}", tokens.join(" ")));
        }
    }
    let missing = names.iter().filter(|name| !shown.iter().any(|tokens| is_example_of(tokens, name)));
    complaints.extend(missing.map(|name| format!("{name}: no help has an example of it")));
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// docs/reference/cli.md lists each command with its summary, in the order of the help.
#[test]
fn the_index_of_commands_is_complete() {
    fn add(command: &Command, lines: &mut Vec<String>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            if below.get_name() != "help" {
                let name = below.get_bin_name().expect("it is built");
                lines.push(format!("`{name}` | {}", below.get_about().expect("it has one")));
                add(below, lines);
            }
        }
    }
    let mut expected = Vec::new();
    add(&built(), &mut expected);
    let index = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/cli.md");
    let index = std::fs::read_to_string(index).expect("the index is there");
    let rows = index.lines().filter(|line| line.starts_with("| `weir ") || line.starts_with("| [`weir "));
    let found: Vec<_> = rows
        .map(|row| {
            let (name, about) = row.trim_matches(['|', ' ']).split_once(" | ").expect("two columns");
            let name = name.trim_start_matches('[').split("](").next().expect("a name");
            format!("{name} | {about}")
        })
        .collect();
    assert_eq!(found, expected, "correct docs/reference/cli.md");
}

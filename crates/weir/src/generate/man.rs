//! The manual pages: one for each command, from its help.
//!
//! `clap_mangen` renders options, headings and lists of commands. This module adds the layout of
//! the text below the options (examples, notes, the exit status), and the files and variables of a
//! command, which are derived from its options.

use std::io;

use clap::Command;
use clap_mangen::{
    Man,
    roff::{Inline, Roff, bold, roman},
};

/// Exit status of commands whose help does not describe it.
const EXIT_STATUS: &str = "Exit status: 0 done, 1 failed, 2 wrong use of the command line.";
/// Prefix of the exit status in a help text.
const EXIT: &str = "Exit status: ";

/// Files and variables, each with the option that indicates that a command uses it.
const FILES: [(&str, &str, &str); 3] = [
    ("config", "/etc/weir/weir.toml", "The config file of the service weir.service: weir.toml(5)."),
    ("qmp", "/run/weir/qmp.sock", "The default control socket of the daemon."),
    ("state", "/var/lib/weir", "Results of `weir probe`, when run as root."),
];
const VARIABLES: [(&str, &str, &str); 1] =
    [("qmp", "WEIR_QMP", "Control socket to use instead of the default, as unix:PATH.")];

/// One manual page.
pub(super) struct ManPage {
    pub(super) file: String,
    pub(super) text: Vec<u8>,
}

/// A page for `command`, and for each visible command below it.
pub(super) fn pages(command: Command, date: &str) -> io::Result<Vec<ManPage>> {
    // `help` would otherwise get a page for each command below it.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add(&command, None, date, &mut pages)?;
    Ok(pages)
}

fn add(command: &Command, above: Option<&Command>, date: &str, pages: &mut Vec<ManPage>) -> io::Result<()> {
    pages.push(page(command, above, date)?);
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    below.into_iter().try_for_each(|below| add(below, Some(command), date, pages))
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &Command, above: Option<&Command>, date: &str) -> io::Result<ManPage> {
    let source = concat!("weir ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).date(date).source(source).manual("User Commands");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    synopsis(command).to_writer(&mut text)?;
    man.render_description_section(&mut text)?;
    let has_arguments = command.get_arguments().any(|argument| !argument.is_hide_set());
    if has_arguments {
        man.render_options_section(&mut text)?;
    }
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut text)?;
    }
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    below_options(&help).to_writer(&mut text)?;
    related(command, above).to_writer(&mut text)?;
    Ok(ManPage { file: man.get_filename(), text: without_repeated_breaks(&text) })
}

/// Merges the two line breaks that `clap_mangen` sets before the values of an option.
fn without_repeated_breaks(page: &[u8]) -> Vec<u8> {
    let page = String::from_utf8_lossy(page);
    page.replace(".br\n\n.br\n", ".sp\n").into_bytes()
}

/// Usage lines of the help.
fn synopsis(command: &Command) -> Roff {
    let usage = command.clone().render_usage().to_string();
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    let lines = usage.trim_start_matches("Usage:").lines().map(str::trim).filter(|line| !line.is_empty());
    for (index, line) in lines.enumerate() {
        if index > 0 {
            roff.control("br", []);
        }
        let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
        let rest = line.strip_prefix(name).unwrap_or(line);
        roff.text([bold(name), roman(rest)]);
    }
    roff
}

/// Examples, notes and the exit status, from the text below the options.
fn below_options(help: &str) -> Roff {
    let (exit, rest): (Vec<_>, Vec<_>) = help.lines().partition(|line| line.starts_with(EXIT));
    let begin = rest.iter().position(|line| *line == "Examples:");
    let (before, examples, notes) = match begin {
        Some(begin) => {
            let after = &rest[begin + 1..];
            let end = after.iter().position(|line| line.is_empty()).unwrap_or(after.len());
            (&rest[..begin], &after[..end], &after[end..])
        }
        None => (&[][..], &[][..], &rest[..]),
    };
    let mut roff = Roff::new();
    if let [heading, block @ ..] = before {
        add_notes(&mut roff, heading.trim_end_matches(':'), block);
    }
    let skipped = notes.iter().position(|line| !line.is_empty()).unwrap_or(notes.len());
    add_notes(&mut roff, "Notes", &notes[skipped..]);
    roff.control("SH", ["EXIT STATUS"]);
    let exit = exit.first().copied().unwrap_or(EXIT_STATUS);
    roff.text([roman(&exit[EXIT.len()..])]);
    add_examples(&mut roff, examples);
    roff
}

fn add_notes(roff: &mut Roff, heading: &str, lines: &[&str]) {
    if lines.is_empty() {
        return;
    }
    roff.control("SH", [heading.to_uppercase().as_str()]);
    let (mut is_table, mut is_first) = (false, true);
    for line in lines.iter().filter(|line| !line.is_empty()) {
        // Indented lines are a table and keep their layout; any other line is a paragraph.
        let indented = line.starts_with(' ');
        if indented != is_table {
            roff.control(if indented { "nf" } else { "fi" }, []);
            is_table = indented;
        }
        if !indented && !is_first {
            roff.control("PP", []);
        }
        is_first = false;
        roff.text([roman(*line)]);
    }
    if is_table {
        roff.control("fi", []);
    }
}

/// Lays out examples: a command is indented by two columns, its explanation or continuation by six.
fn add_examples(roff: &mut Roff, lines: &[&str]) {
    if lines.is_empty() {
        return;
    }
    roff.control("SH", ["EXAMPLES"]);
    let mut is_continued = false;
    for (index, line) in lines.iter().enumerate() {
        let is_command = !line.starts_with("   ");
        match (is_command, is_continued) {
            (true, _) => {
                if index > 0 {
                    roff.control("PP", []);
                }
                roff.text([bold(line.trim())]);
            }
            (false, true) => roff_line(roff, bold(format!("    {}", line.trim()))),
            (false, false) => {
                roff.control("RS", ["4"]);
                roff.text([roman(line.trim())]);
                roff.control("RE", []);
            }
        }
        is_continued = line.ends_with('\\');
    }
}

/// Adds text on a new line.
fn roff_line(roff: &mut Roff, inline: Inline) {
    roff.control("br", []);
    roff.text([inline]);
}

/// Files, variables, and related pages.
fn related(command: &Command, above: Option<&Command>) -> Roff {
    let mut roff = Roff::new();
    let is_top = above.is_none();
    let has_option =
        |option: &str| command.get_arguments().any(|argument| argument.get_long() == Some(option));
    for (heading, list) in [("FILES", &FILES[..]), ("ENVIRONMENT", &VARIABLES[..])] {
        // The top page lists all of them.
        let mut of_this = list.iter().filter(|(option, ..)| is_top || has_option(option)).peekable();
        if of_this.peek().is_some() {
            roff.control("SH", [heading]);
        }
        for (_, name, description) in of_this {
            roff.control("TP", []);
            roff.text([bold(*name)]);
            roff.text([roman(*description)]);
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    let names: Vec<_> = above.into_iter().chain(below).map(page_name).collect();
    for (index, name) in names.iter().enumerate() {
        let separator = if index + 1 < names.len() { ", " } else { "" };
        roff.text([bold(*name), roman(format!("(1){separator}"))]);
    }
    roff.control("PP", []);
    roff.text([roman("The guides and references: /usr/share/doc/weir.")]);
    roff
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;

    fn generated(file: &str) -> String {
        let pages = pages(Cli::full_command(), "2026-01-02").unwrap();
        let page = pages.into_iter().find(|page| page.file == file).expect(file);
        String::from_utf8(page.text).unwrap()
    }

    #[test]
    fn every_visible_command_has_a_page() {
        let files: Vec<_> =
            pages(Cli::full_command(), "2026-01-02").unwrap().into_iter().map(|page| page.file).collect();
        for file in ["weir.1", "weir-serve.1", "weir-image-convert.1", "weir-cgroup-limit.1"] {
            assert!(files.contains(&file.to_owned()), "{file}: {files:?}");
        }
        assert!(!files.iter().any(|file| file.contains("generate") || file.contains("help")), "{files:?}");
    }

    #[test]
    fn page_has_the_help_and_more() {
        let page = generated("weir-serve.1");
        let mut at = 0;
        for part in [
            ".SH NAME\n",
            ".SH SYNOPSIS\n\\fBweir serve\\fR [OPTIONS] <IMAGE>...\n.br\n\\fBweir serve\\fR",
            ".SH OPTIONS\n",
            "\\fB\\-\\-config\\fR",
            ".SH LIMITS\n",
            ".SH NOTES\n",
            "SIGTERM and SIGINT",
            ".SH \"EXIT STATUS\"\n0 ended as asked, 1 failed",
            ".SH EXAMPLES\n\\fBweir serve vm1.raw\\fR\n.RS 4\nThe image at nbd",
            "\\-\\-nbd unix:/run/vm1.sock \\\\\\fR\n.br\n\\fB    \\-\\-iops\\-total 1000",
            ".SH FILES\n.TP\n\\fB/etc/weir/weir.toml\\fR\n",
            ".SH \"SEE ALSO\"\n\\fBweir\\fR(1)\n",
        ] {
            let found = page[at..].find(part).unwrap_or_else(|| panic!("{part:?} after {at} of\n{page}"));
            at += found;
        }
    }
}

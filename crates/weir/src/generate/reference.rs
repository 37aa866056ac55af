//! The reference of the command line in Markdown: a page with the help of each command.

use clap::Command;

/// Columns of a page, as in a terminal.
const COLUMNS: usize = 100;

/// File name and text of one page for each command below `command` that is not hidden.
pub(super) fn pages(command: Command) -> Vec<(String, String)> {
    let mut command = command.disable_help_subcommand(true).term_width(COLUMNS);
    command.build();
    let mut pages = Vec::new();
    add(&command, &mut pages);
    pages
}

fn add(command: &Command, pages: &mut Vec<(String, String)>) {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let name = below.get_bin_name().unwrap_or_else(|| below.get_name());
        let help = below.clone().render_long_help().to_string();
        // clap pads some lines with spaces, which editors and linters would remove.
        let help: String = help.trim_end().lines().map(|line| line.trim_end().to_owned() + "\n").collect();
        let file = name.trim_start_matches("weir ").replace(' ', "-") + ".md";
        pages.push((file, format!("# `{name}`\n\n```text\n{help}```\n")));
        add(below, pages);
    }
}

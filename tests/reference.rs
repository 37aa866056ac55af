//! The reference of the command line, docs/reference/cli/, is what `--help` prints: a page for each
//! command, and an index of them.
//!
//! A page may say more than `--help` does. The test owns three things: the title, the block below
//! `## Options`, and in the index everything below `## Commands`. The rest is written by hand and
//! stays when the pages are refreshed.
//!
//! After a change of the command line: `WEIR_REFRESH=1 cargo test -p weir --test e2e reference`.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process,
};

use crate::harness::WEIR;

/// The page that lists all others. Forges show it for the directory.
const INDEX: &str = "README.md";

struct Command {
    words: Vec<String>,
    about: String,
    help: String,
}

impl Command {
    fn title(&self) -> String {
        format!("# `weir {}`\n", self.words.join(" "))
    }

    fn page(&self) -> String {
        self.words.join("-") + ".md"
    }
}

fn help(words: &[String]) -> String {
    let output =
        process::Command::new(WEIR).args(words).arg("--help").env_remove("COLUMNS").output().unwrap();
    assert!(output.status.success(), "help is no failure");
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// The names and lines below `Commands:` of a help text. `help` itself needs no page.
fn listed(help: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    for line in lines.take_while(|line| !line.is_empty()) {
        let entry = line.strip_prefix("  ").expect("entries of the list are indented");
        if entry.starts_with(' ') {
            let (_, about) = commands.last_mut().expect("a list begins with a name");
            *about += &format!(" {}", entry.trim());
        } else {
            let (name, about) = entry.split_once(' ').expect("each command says what it does");
            commands.push((name.to_owned(), about.trim().to_owned()));
        }
    }
    commands.retain(|(name, _)| name != "help");
    commands
}

/// Each is followed by its own subcommands, in the order of the help texts.
fn commands_below(words: &[String]) -> Vec<Command> {
    let mut commands = Vec::new();
    for (name, about) in listed(&help(words)) {
        let words = [words, &[name]].concat();
        commands.push(Command { help: help(&words), words: words.clone(), about });
        commands.extend(commands_below(&words));
    }
    commands
}

/// `page` with the title and the options that `command` has now.
fn refreshed_page(command: &Command, page: &str) -> String {
    let notes = page.split_once('\n').map_or("\n", |(_, rest)| rest);
    let (before, below) = notes.split_once("## Options\n").unwrap_or((notes, ""));
    let after = below.split_once("\n```\n").map_or("", |(_, after)| after);
    let before = if before.trim().is_empty() { "\n" } else { before };
    format!("{}{before}## Options\n\n```text\n{}\n```\n{after}", command.title(), command.help.trim_end())
}

fn refreshed_index(commands: &[Command], index: &str) -> String {
    let (before, _) = index.split_once("## Commands\n").expect("the index has a heading `Commands`");
    let lines: String = commands
        .iter()
        .map(|command| {
            let name = command.words.join(" ");
            format!("| [`weir {name}`]({}) | {} |\n", command.page(), command.about)
        })
        .collect();
    format!("{before}## Commands\n\n| Command | What it does |\n| --- | --- |\n{lines}")
}

fn pages_in(directory: &Path) -> BTreeMap<String, String> {
    fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(path).unwrap())
        })
        .collect()
}

fn refresh(directory: &Path, found: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) {
    for (name, text) in wanted {
        fs::write(directory.join(name), text).unwrap();
    }
    for name in found.keys().filter(|name| !wanted.contains_key(*name)) {
        fs::remove_file(directory.join(name)).unwrap();
    }
}

#[test]
fn the_reference_is_what_help_prints() {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli");
    let found = pages_in(&directory);
    let text = |name: &str| found.get(name).map_or("", String::as_str);

    let commands = commands_below(&[]);
    let mut wanted: BTreeMap<_, _> = commands
        .iter()
        .map(|command| (command.page(), refreshed_page(command, text(&command.page()))))
        .collect();
    wanted.insert(INDEX.to_owned(), refreshed_index(&commands, text(INDEX)));
    assert!(wanted["serve.md"].contains("--iops-total-max-length"), "the help of `serve` is there");
    assert!(wanted.contains_key("image-convert.md"), "subcommands have pages");

    if env::var_os("WEIR_REFRESH").is_some() {
        refresh(&directory, &found, &wanted);
        return;
    }
    let complaints: Vec<_> = wanted
        .iter()
        .filter_map(|(name, text)| match found.get(name) {
            None => Some(format!("{name} is missing")),
            Some(page) if page != text => Some(format!("{name} is not what --help prints")),
            Some(_) => None,
        })
        .chain(
            found
                .keys()
                .filter(|name| !wanted.contains_key(*name))
                .map(|name| format!("{name} is left over: there is no such command")),
        )
        .collect();
    assert!(
        complaints.is_empty(),
        "docs/reference/cli: {}\nrefresh it with `WEIR_REFRESH=1 cargo test -p weir --test e2e reference`",
        complaints.join("; ")
    );
}

#[test]
fn notes_survive_a_refresh() {
    let command =
        Command { words: vec!["image".into(), "map".into()], about: "…".into(), help: "new\n".into() };
    let page = "# `weir map`\n\nNotes.\n\n## Options\n\n```text\nold\n```\n\n## JSON\n\nMore.\n";
    let refreshed = refreshed_page(&command, page);
    assert_eq!(
        refreshed,
        "# `weir image map`\n\nNotes.\n\n## Options\n\n```text\nnew\n```\n\n## JSON\n\nMore.\n"
    );
    assert_eq!(refreshed_page(&command, &refreshed), refreshed, "a refreshed page stays as it is");
    assert_eq!(refreshed_page(&command, ""), "# `weir image map`\n\n## Options\n\n```text\nnew\n```\n");
}

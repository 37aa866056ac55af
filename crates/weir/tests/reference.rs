//! The reference of the command line in docs/reference/cli.md is what `--help` prints.
//!
//! To refresh it after a change: `WEIR_REFRESH=1 cargo test -p weir --test reference`.

use std::{env, fs, path::PathBuf, process::Command};

/// What the command prints, at a width of its own choice.
fn help(arguments: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_weir")).args(arguments).env_remove("COLUMNS").output().unwrap();
    assert!(output.status.success(), "help is no failure");
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// `document` with the text block below each heading `## weir …` replaced by that command's help.
fn with_current_help(document: &str) -> String {
    let mut sections = document.split("\n## `");
    let mut refreshed = sections.next().unwrap().to_owned();
    for section in sections {
        let (command, rest) = section.split_once('`').expect("a heading ends");
        let (before, block) = rest.split_once("```text\n").expect("each command has a block of its help");
        let (_, after) = block.split_once("\n```").expect("a block ends");
        let arguments: Vec<_> = command.split_whitespace().skip(1).chain(["--help"]).collect();
        let help = help(&arguments);
        refreshed += &format!("\n## `{command}`{before}```text\n{}\n```{after}", help.trim_end());
    }
    refreshed
}

#[test]
fn the_reference_is_what_help_prints() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
    let document = fs::read_to_string(&path).unwrap();
    let current = with_current_help(&document);
    assert!(current.contains("--iops-total-max-length"), "the help of `serve` is there");
    if env::var_os("WEIR_REFRESH").is_some() {
        fs::write(&path, &current).unwrap();
        return;
    }
    assert!(
        document == current,
        "docs/reference/cli.md is not what --help prints; refresh it with \
         `WEIR_REFRESH=1 cargo test -p weir --test reference`"
    );
}

//! Advice for options and commands of qemu-img that `weir image` does not have.

use clap::{
    builder::StyledStr,
    error::{ContextKind, ContextValue},
};

// Subcommand (or "" for any), unsupported option or command, and the advice.
const INSTEAD: [(&str, &str, &str); 3] = [
    (
        "convert",
        "-C",
        "copies are never offloaded (leave -C out; `cp --reflink` makes a copy that shares its blocks)",
    ),
    ("convert", "-s", "-l SNAPSHOT reads a snapshot"),
    ("", "dd", "`weir image convert` copies a whole disk; qemu-img, or dd(1) on a raw image, a part"),
];

/// Adds the advice to an error about a command line that consists of these words.
pub fn advise(error: &mut clap::Error, words: &[String]) {
    let [image, subcommand, ..] = words else { return };
    if image != "image" {
        return;
    }
    let unknown =
        error.get(ContextKind::InvalidArg).or_else(|| error.get(ContextKind::InvalidSubcommand)).cloned();
    let Some(ContextValue::String(unknown)) = unknown else { return };
    let instead = INSTEAD
        .iter()
        .find(|(of, what, _)| (of.is_empty() || of == subcommand) && *what == unknown)
        .map(|(.., instead)| StyledStr::from(*instead));
    let instead = instead.or_else(|| repair_without_equals(subcommand, words));
    if let Some(instead) = instead {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![instead]));
    }
}

/// Advice for `--repair WHAT`: the value is optional, so it needs an equals sign.
fn repair_without_equals(subcommand: &str, words: &[String]) -> Option<StyledStr> {
    let what = words.iter().skip_while(|word| *word != "--repair").nth(1)?;
    let is_meant = subcommand == "check" && ["all", "leaks"].contains(&&**what);
    is_meant.then(|| format!("write --repair={what}, or -r {what}").into())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    #[derive(Debug, clap::Parser)]
    struct TestCommandLine {
        #[command(subcommand)]
        _command: CommandWords,
    }

    #[derive(Debug, clap::Subcommand)]
    enum CommandWords {
        #[command(subcommand)]
        Image(Box<crate::ImageCommand>),
        Serve,
    }

    fn said(line: &str) -> String {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let mut error = TestCommandLine::try_parse_from(&words).unwrap_err();
        super::advise(&mut error, &words[1..]);
        error.render().to_string()
    }

    #[test]
    fn qemu_img_options_are_rejected_with_advice() {
        for (line, instead) in [
            ("weir image convert -C a b", "cp --reflink"),
            ("weir image convert -s one a b", "-l SNAPSHOT"),
            ("weir image dd if=a of=b", "dd(1)"),
            ("weir image check --repair all a", "--repair=all"),
            ("weir image check a --repair leaks", "--repair=leaks"),
        ] {
            let said = said(line);
            assert!(said.contains(instead), "{line}: {said}");
            assert!(!said.contains("as a value"), "{line}: {said}");
        }
        assert!(!said("weir serve -C a").contains("reflink"));
    }
}

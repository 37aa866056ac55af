//! Advice for options and commands of qemu-img that `weir image` does not have.

use clap::{
    builder::StyledStr,
    error::{ContextKind, ContextValue},
};

// Subcommand (or "" for any), unsupported option or command, and the advice.
const ADVICE: [(&str, &str, &str); 3] = [
    (
        "convert",
        "-C",
        "copies are never offloaded (leave -C out; `cp --reflink` makes a copy that shares its blocks)",
    ),
    ("convert", "-s", "-l SNAPSHOT reads a snapshot"),
    ("", "dd", "`weir image convert` copies a whole disk; qemu-img, or dd(1) on a raw image, a part"),
];

/// Adds the advice to an error about a command line that consists of these words.
pub fn advise(error: &mut clap::Error, arguments: &[String]) {
    let [image, subcommand, ..] = arguments else { return };
    if image != "image" {
        return;
    }
    let unknown =
        error.get(ContextKind::InvalidArg).or_else(|| error.get(ContextKind::InvalidSubcommand)).cloned();
    let Some(ContextValue::String(unknown)) = unknown else { return };
    let advice = ADVICE
        .iter()
        .find(|(scope, name, _)| (scope.is_empty() || scope == subcommand) && *name == unknown)
        .map(|(.., advice)| StyledStr::from(*advice));
    let advice = advice.or_else(|| repair_without_equals(subcommand, arguments));
    if let Some(advice) = advice {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice]));
    }
}

/// Advice for `--repair WHAT`: the value is optional, so it needs an equals sign.
fn repair_without_equals(subcommand: &str, arguments: &[String]) -> Option<StyledStr> {
    let scope = arguments.iter().skip_while(|argument| *argument != "--repair").nth(1)?;
    let is_repair = subcommand == "check" && ["all", "leaks"].contains(&&**scope);
    is_repair.then(|| format!("write --repair={scope}, or -r {scope}").into())
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

    fn rendered_error(line: &str) -> String {
        let arguments: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let mut error = TestCommandLine::try_parse_from(&arguments).unwrap_err();
        super::advise(&mut error, &arguments[1..]);
        error.render().to_string()
    }

    #[test]
    fn qemu_img_options_are_rejected_with_advice() {
        for (line, advice) in [
            ("weir image convert -C a b", "cp --reflink"),
            ("weir image convert -s one a b", "-l SNAPSHOT"),
            ("weir image dd if=a of=b", "dd(1)"),
            ("weir image check --repair all a", "--repair=all"),
            ("weir image check a --repair leaks", "--repair=leaks"),
        ] {
            let message = rendered_error(line);
            assert!(message.contains(advice), "{line}: {message}");
            assert!(!message.contains("as a value"), "{line}: {message}");
        }
        assert!(!rendered_error("weir serve -C a").contains("reflink"));
    }
}

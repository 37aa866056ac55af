//! `weir generate`: files of a package that derive from the command line.
//!
//! ```text
//!   DIR/man/man1/weir-serve.1 …                   a page for each command
//!   DIR/man/man5/weir.toml.5                      the keys of the config file
//!   DIR/doc/weir/docs/reference/cli/serve.md …    the same in Markdown
//!   DIR/bash-completion/completions/weir
//!   DIR/zsh/site-functions/_weir
//!   DIR/fish/vendor_completions.d/weir.fish
//! ```
//!
//! `--reference docs/reference` updates the files kept in the source tree: the tables of keys in
//! config.md, and config.schema.json.
//!
//! DIR becomes `PREFIX/share`: `make install` and the Debian package run the command. The scripts
//! are small and call the program itself (`complete`).

mod config_page;
mod keys;
mod man;
mod reference;
mod schema;
mod tables;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::{Args, Command};
use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};
use console::CommandFailure;

use crate::complete;

/// Arguments of `weir generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Target directory, which becomes PREFIX/share
    #[arg(value_name = "DIR", required_unless_present = "reference", requires = "date")]
    directory: Option<PathBuf>,
    /// Date of the manual pages
    #[arg(long, value_name = "YYYY-MM-DD", default_value = "")]
    date: String,
    /// Update the tables of keys and the schema in this directory of the source tree
    #[arg(long, value_name = "DIR", conflicts_with = "directory")]
    reference: Option<PathBuf>,
}

/// Writes the files for this definition of the command line.
pub(crate) fn run(arguments: &GenerateArgs, command: Command) -> Result<(), CommandFailure> {
    if let Some(reference) = &arguments.reference {
        update_reference(reference)?;
    }
    let Some(directory) = &arguments.directory else { return Ok(()) };
    for (file, text) in reference::pages(command.clone()) {
        write(&directory.join("doc/weir/docs/reference/cli").join(file), text.as_bytes())?;
    }
    for page in man::pages(command, &arguments.date)? {
        write(&directory.join("man/man1").join(page.file), &page.text)?;
    }
    write(&directory.join("man/man5/weir.toml.5"), &config_page::page(&arguments.date)?)?;
    let scripts: [(&dyn EnvCompleter, &str, &str); 3] = [
        (&Bash, "bash-completion/completions/weir", WHOLE_WORDS),
        (&Zsh, "zsh/site-functions/_weir", AT_ONCE),
        (&Fish, "fish/vendor_completions.d/weir.fish", ""),
    ];
    for (shell, path, more) in scripts {
        let mut script = Vec::new();
        // A registration calls the program at each completion: it stays valid after an update of
        // the program.
        shell.write_registration(complete::VARIABLE, "weir", "weir", "weir", &mut script)?;
        script.extend(more.as_bytes());
        write(&directory.join(path), &script)?;
    }
    Ok(())
}

/// zsh loads the script at the first completion, as the function that has to complete then.
const AT_ONCE: &str = "if [[ $funcstack[1] == _weir ]]; then\n    _clap_dynamic_completer_weir \"$@\"\nfi\n";

/// Bash splits `--cache=w` at the `=` and replaces only the last piece by a completion.
const WHOLE_WORDS: &str = r#"
_weir() {
    local word whole=() joined='' before
    for word in "${COMP_WORDS[@]:0:COMP_CWORD}" "$2"; do
        if [[ $word == = || $joined == = ]] && (( ${#whole[@]} )); then
            whole[-1]+=$word
        else
            whole+=("$word")
        fi
        joined=$word
    done
    local COMP_WORDS=("${whole[@]}") COMP_CWORD=$(( ${#whole[@]} - 1 ))
    _clap_complete_weir "$1" "${whole[-1]}"
    before=${whole[-1]%"${whole[-1]##*=}"}
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
# Bash before 4.4 has no nosort.
complete -o nospace -o bashdefault -o nosort -F _weir weir 2> /dev/null \
    || complete -o nospace -o bashdefault -F _weir weir
"#;

/// Updates the files in the source tree that contain tables of keys.
fn update_reference(reference: &Path) -> anyhow::Result<()> {
    write(&reference.join(schema::FILE), schema::text()?.as_bytes())?;
    let document = reference.join(tables::DOCUMENT);
    let text = fs::read_to_string(&document).with_context(|| document.display().to_string())?;
    write(&document, tables::updated(&text)?.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, bytes));
    written.with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests;

//! The file with the token that authorizes changes; read once, at the start.

use std::{fmt, io::Read as _, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::{Context as _, bail, ensure};
use reactor::regular_file;

/// Least length: shorter tokens can be guessed.
const MIN_LENGTH: usize = 16;
/// Greatest length: longer tokens do not fit into a request head.
const MAX_LENGTH: usize = 4096;

/// Token that authorizes changes.
pub struct ChangeToken(Vec<u8>);

/// Hides the token.
impl fmt::Debug for ChangeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl ChangeToken {
    /// Reads the file's only line.
    ///
    /// # Errors
    /// Fails if the file is readable by users other than its owner, or if its line cannot be sent
    /// as a token.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let context = || format!("http-token-file {}", path.display());
        Self::of(path).with_context(context)
    }

    fn of(path: &Path) -> anyhow::Result<Self> {
        let file = regular_file::open(path)?;
        let known = file.metadata()?;
        let mode = known.mode() & 0o777;
        // Checked on the open file, so that it cannot be replaced in between.
        if known.is_file() && mode & 0o077 != 0 {
            bail!("mode {mode:04o} makes it accessible to others (chmod 600 {})", path.display());
        }
        let mut text = Vec::new();
        // Bounded read. Two bytes more than the bound distinguish a token that is too long from a
        // line end.
        file.take(MAX_LENGTH as u64 + 2).read_to_end(&mut text)?;
        let token = text.trim_ascii();
        ensure!(
            token.len() <= MAX_LENGTH,
            "the token is longer than {MAX_LENGTH} characters (create one with `openssl rand -hex 32`)"
        );
        ensure!(
            token.len() >= MIN_LENGTH && token.iter().all(u8::is_ascii_graphic),
            "the file must hold one line of at least {MIN_LENGTH} characters without spaces \
             (create one with `openssl rand -hex 32`)"
        );
        Ok(Self(token.to_owned()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    fn read(content: &str, mode: u32) -> Result<Vec<u8>, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        ChangeToken::of(&path).map(|token| token.bytes().to_owned()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_token_is_one_line_readable_by_its_owner() {
        assert_eq!(read("0123456789abcdef\n", 0o600).unwrap(), b"0123456789abcdef");
        assert_eq!(read("0123456789abcdef", 0o400).unwrap(), b"0123456789abcdef");
        for (content, mode, why) in [
            ("0123456789abcdef", 0o640, "mode 0640 makes it"),
            ("0123456789abcdef", 0o604, "mode 0604 makes it"),
            ("0123456789abcde", 0o600, "one line of at least 16 characters"),
            ("0123456789 abcdef", 0o600, "one line of at least 16 characters"),
            ("0123456789abcdef\nanother", 0o600, "one line of at least 16 characters"),
            ("", 0o600, "one line of at least 16 characters"),
            (&"x".repeat(MAX_LENGTH + 1), 0o600, "longer than 4096"),
        ] {
            let error = read(content, mode).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let missing = ChangeToken::read(Path::new("/nonexistent/token")).unwrap_err();
        assert!(
            format!("{missing:#}").starts_with("http-token-file /nonexistent/token: No such file"),
            "{missing:#}"
        );
    }
}

//! Where results are kept: in the files that `--result` and `--report` name.
//!
//! Never replaces what weir has not written.

use anyhow::bail;

use super::page;
use crate::result::{Kind, ResultFile, arguments::ResultArgs, check, save, write};

impl ResultArgs {
    /// Whether a result can be kept where the options say, as far as that can be known before there
    /// is one.
    ///
    /// # Errors
    /// If the directory cannot be written to, or there is something that is not to be replaced.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.result {
            check(path, Kind::Result)?;
            if self.report.as_ref() == Some(path) {
                bail!("--report {}: is the file of --result (choose another name)", path.display());
            }
        }
        self.report.as_ref().map_or(Ok(()), |path| check(path, Kind::Page))
    }

    /// Keeps a result where the options say. Where one file cannot be written, the other is all the
    /// same.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn keep(&self, result: &ResultFile) -> anyhow::Result<()> {
        let kept = self.result.as_ref().map_or(Ok(()), |path| save(result, path));
        let draw = |path| write(path, Kind::Page, &page(result)?);
        kept.and(self.report.as_ref().map_or(Ok(()), |path: &std::path::PathBuf| draw(path)))
    }
}

//! Saves results in the files of `--result` and `--report`. Never replaces a file that weir has not
//! written.

use anyhow::bail;

use super::page;
use crate::result::{OutputKind, ResultFile, arguments::ResultArgs, check, save, write};

impl ResultArgs {
    /// Fails if the files cannot be written, as far as that is known before the measurement.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.result {
            check(path, OutputKind::Result)?;
            if self.report.as_ref() == Some(path) {
                bail!("--report {}: is the file of --result (choose another name)", path.display());
            }
        }
        self.report.as_ref().map_or(Ok(()), |path| check(path, OutputKind::Page))
    }

    /// Saves both files; a failure of one does not prevent the second.
    pub(crate) fn save_files(&self, result: &ResultFile) -> anyhow::Result<()> {
        let saved = self.result.as_ref().map_or(Ok(()), |path| save(result, path));
        let draw = |path| write(path, OutputKind::Page, &page(result)?);
        saved.and(self.report.as_ref().map_or(Ok(()), |path: &std::path::PathBuf| draw(path)))
    }
}

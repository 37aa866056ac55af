//! Keeps results in the files that `--result` and `--report` name. Never replaces what weir has not
//! written.

use anyhow::bail;

use super::page;
use crate::result::{Kind, ResultFile, arguments::ResultArgs, check, save, write};

impl ResultArgs {
    /// Whether the files can be written, as far as that can be known beforehand.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.result {
            check(path, Kind::Result)?;
            if self.report.as_ref() == Some(path) {
                bail!("--report {}: is the file of --result (choose another name)", path.display());
            }
        }
        self.report.as_ref().map_or(Ok(()), |path| check(path, Kind::Page))
    }

    /// Where one file cannot be written, the other still is.
    pub(crate) fn keep(&self, result: &ResultFile) -> anyhow::Result<()> {
        let kept = self.result.as_ref().map_or(Ok(()), |path| save(result, path));
        let draw = |path| write(path, Kind::Page, &page(result)?);
        kept.and(self.report.as_ref().map_or(Ok(()), |path: &std::path::PathBuf| draw(path)))
    }
}

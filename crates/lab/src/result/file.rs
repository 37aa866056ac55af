//! Reads and writes result files and report pages.
//!
//! Names may be mistyped and measurements take long, so the destination is examined beforehand
//! ([`check`]): a file of the same kind is replaced atomically; a special file (`/dev/null`, a
//! pipe) is written into; anything else, such as an image, is not changed.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use super::{FORMAT, ResultFile, VERSION};

/// A result of hundreds of configurations takes a few MiB.
const LARGEST_BYTES: u64 = 64 << 20;
const BEGINNING_BYTES: u64 = 1024;
/// The kernel's limit on symbolic links in a path.
const MAX_LINKS: u32 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputKind {
    Result,
    Page,
    Chart,
}

impl OutputKind {
    /// Recognizes a file written by weir by its beginning; an empty file may be replaced as well.
    fn is_ours(self, beginning: &str) -> bool {
        let (first, mark) = match self {
            Self::Result => ("{", FORMAT),
            Self::Page => ("<!DOCTYPE html>", "content=\"weir "),
            Self::Chart => ("<svg ", "<!-- weir "),
        };
        beginning.is_empty() || beginning.trim_start().starts_with(first) && beginning.contains(mark)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Result => "a result of weir's",
            Self::Page => "a page of weir's",
            Self::Chart => "a chart of weir's",
        }
    }
}

enum OutputDestination {
    File(PathBuf),
    WriteInto,
}

impl OutputDestination {
    fn of(path: &Path, kind: OutputKind) -> anyhow::Result<Self> {
        // A dangling symbolic link is followed, so that the file is created at its target.
        let Ok(meta) = fs::metadata(path) else { return Ok(Self::File(followed(path)?)) };
        let is = meta.file_type();
        if is.is_dir() {
            bail!("is a directory (name a file in it)");
        }
        if is.is_block_device() {
            bail!("is a block device, and its data would be lost (choose another name)");
        }
        if !is.is_file() {
            return Ok(Self::WriteInto);
        }
        let mut beginning = Vec::new();
        // The mark of each kind is within the first bytes.
        fs::File::open(path)?.take(BEGINNING_BYTES).read_to_end(&mut beginning)?;
        if !kind.is_ours(&String::from_utf8_lossy(&beginning)) {
            bail!("exists and is not {}, so it is not replaced (choose another name)", kind.name());
        }
        // The rename must replace the target, not the link to it.
        Ok(Self::File(fs::canonicalize(path)?))
    }
}

fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = directory(&path).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(nix::libc::ELOOP))
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn unnamed(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o644)).tempfile_in(directory(path))
}

/// Fails if the file cannot be written, as far as that is known in advance.
pub(crate) fn check(path: &Path, kind: OutputKind) -> anyhow::Result<()> {
    let try_create = || {
        if let OutputDestination::File(path) = OutputDestination::of(path, kind)? {
            unnamed(&path)?;
        }
        anyhow::Ok(())
    };
    try_create().with_context(|| cannot(path))
}

pub(crate) fn save(result: &ResultFile, path: &Path) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(result).context("the result cannot be written as JSON")?;
    write(path, OutputKind::Result, &(text + "\n"))
}

/// Writes a file atomically; never replaces a file that weir has not written.
pub(crate) fn write(path: &Path, kind: OutputKind, text: &str) -> anyhow::Result<()> {
    let write = || {
        match OutputDestination::of(path, kind)? {
            OutputDestination::File(path) => {
                // A temporary file in the same directory, because a rename cannot cross file
                // systems.
                let mut file = unnamed(&path)?;
                file.write_all(text.as_bytes())?;
                file.persist(path).map_err(|error| error.error)?;
            }
            OutputDestination::WriteInto => {
                fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())?;
            }
        }
        anyhow::Ok(())
    };
    write().with_context(|| cannot(path))
}

fn cannot(path: &Path) -> String {
    format!("{}: cannot be written", path.display())
}

pub(crate) fn load(path: &Path) -> anyhow::Result<ResultFile> {
    let read = || {
        let file = reactor::regular_file::open(path).context("is no result file")?;
        let mut text = Vec::new();
        // One byte more than allowed reveals a file that is too large.
        file.take(LARGEST_BYTES + 1).read_to_end(&mut text)?;
        if text.len() as u64 > LARGEST_BYTES {
            bail!("is no result file: it has more than {LARGEST_BYTES} bytes");
        }
        parse(&text)
    };
    read().with_context(|| path.display().to_string())
}

fn parse(text: &[u8]) -> anyhow::Result<ResultFile> {
    let value: serde_json::Value = serde_json::from_slice(text).context(
        "is no result file (those of `weir bench --result`, `weir tune` and `weir simulate --result` are)",
    )?;
    // Format and version are checked before the structure, for a useful message.
    if value["format"] != FORMAT {
        bail!("is JSON, but no result file of weir: its format is not {FORMAT:?}");
    }
    if value["version"].as_u64().is_none_or(|version| version > VERSION.into()) {
        bail!("is of version {}, and this weir reads up to {VERSION} (use a newer one)", value["version"]);
    }
    let result: ResultFile = serde_json::from_value(value).context("is a damaged result file")?;
    let measures = &result.findings.measures;
    if let Some(measure) = measures.iter().find(|measure| measure.samples.is_empty()) {
        bail!("is a damaged result file: {:?} has no samples", measure.name);
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{Better, Findings, Measure, MeasureUnit, ResultHeader};

    fn result() -> ResultFile {
        let measure = Measure::new("read", MeasureUnit::Iops, Better::Higher, vec![0.1, 1e300, 3.0]);
        ResultFile::new(
            ResultHeader::begin().end(None),
            Findings { measures: vec![measure], ..Findings::default() },
        )
    }

    #[test]
    fn result_file_round_trips() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        save(&result(), &path).unwrap();
        let reloaded = load(&path).unwrap();
        assert_eq!(reloaded.findings, result().findings);
        save(&reloaded, &path).unwrap();
        assert_eq!(load(&path).unwrap(), reloaded);
        assert_eq!(directory.path().read_dir().unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn foreign_files_are_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        fs::write(path("image"), b"QFI\xfb").unwrap();
        fs::write(path("page"), "<!DOCTYPE html><p>mine").unwrap();
        fs::write(path("other.json"), "{\"format\":\"other\"}").unwrap();
        for (name, kind) in [
            ("image", OutputKind::Result),
            ("image", OutputKind::Page),
            ("page", OutputKind::Page),
            ("other.json", OutputKind::Result),
            ("", OutputKind::Result),
            ("nowhere/a.json", OutputKind::Result),
        ] {
            let before = fs::read(path(name)).ok();
            let error = format!("{:#}", check(&path(name), kind).unwrap_err());
            assert!(error.contains("cannot be written: "), "{error}");
            assert!(write(&path(name), kind, "{}").is_err());
            assert_eq!(fs::read(path(name)).ok(), before, "{name}");
        }
        assert_eq!(directory.path().read_dir().unwrap().count(), 3, "nothing else is left");
    }

    #[test]
    fn links_are_followed_and_special_files_are_written_directly() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        std::os::unix::fs::symlink("a.json", path("link")).unwrap();
        std::os::unix::fs::symlink("/dev/null", path("null")).unwrap();
        for _ in 0..2 {
            check(&path("link"), OutputKind::Result).unwrap();
            save(&result(), &path("link")).unwrap();
            assert!(path("link").is_symlink() && load(&path("a.json")).is_ok());
        }
        check(&path("null"), OutputKind::Result).unwrap();
        save(&result(), &path("null")).unwrap();
        assert!(path("null").is_symlink());
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        std::os::unix::fs::symlink("round", path("round")).unwrap();
        assert!(check(&path("round"), OutputKind::Result).is_err());
    }

    #[test]
    fn special_files_are_rejected() {
        for path in ["/dev/zero", "/dev"] {
            let error = format!("{:#}", load(Path::new(path)).unwrap_err());
            assert!(error.contains("not a file"), "{error}");
        }
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(load(&pipe).is_err());
        let large = directory.path().join("large");
        fs::File::create(&large).unwrap().set_len(LARGEST_BYTES + 1).unwrap();
        assert!(format!("{:#}", load(&large).unwrap_err()).contains("has more than"));
    }

    #[test]
    fn invalid_result_file_is_rejected() {
        let mut empty = serde_json::to_value(result()).unwrap();
        empty["findings"]["measures"][0]["samples"] = serde_json::json!([]);
        for (text, why) in [
            ("", "is no result file"),
            ("{}", "its format is not"),
            (r#"{"format":"weir-result","version":2}"#, "is of version 2"),
            (r#"{"format":"weir-result","version":1}"#, "is a damaged result file"),
            (&empty.to_string(), "has no samples"),
        ] {
            let error = format!("{:#}", parse(text.as_bytes()).unwrap_err());
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}

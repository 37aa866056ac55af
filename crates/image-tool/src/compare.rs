//! `weir image compare`: compares the content of two images, with the messages and exit statuses
//! of `qemu-img compare`.
//!
//! Ranges that both images report as zero are not read. The excess of a longer image must be
//! zeroes, unless `-s` requires equal sizes.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    path::PathBuf,
    rc::Rc,
};

use anyhow::anyhow;
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use reactor::{buffer::zero::is_zero, spawn_joinable};
use storage::{CacheMode, ImageFormat};

use super::{
    disk::ExtentKind,
    image_args::{NamingArgs, with_secrets},
    keys::PassphraseArgs,
    opening::{self, OpenMode},
    progress::{CommandProgress, ProgressArgs},
    source::CopySource,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image compare -f raw -F qcow2 vm1.raw vm1.qcow2
      Compare the content that a guest reads.
  weir image compare -s vm1.raw copy.raw
      Compare sizes and holes as well.

Exit status: 0 identical, 1 different, 2 wrong use of the command line or an image that cannot be opened, 4 an image that cannot be read.";

/// The options of `weir image compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// First image
    #[arg(value_name = "FILE1", value_parser = opening::image_name())]
    first: PathBuf,
    /// Second image
    #[arg(value_name = "FILE2", value_parser = opening::image_name())]
    second: PathBuf,
    /// Format of the first image [default: detected]
    #[arg(short, long, value_name = "FORMAT", value_parser = opening::format_option())]
    format: Option<ImageFormat>,
    /// Format of the second image [default: detected]
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = opening::format_option())]
    second_format: Option<ImageFormat>,
    /// Cache mode: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 'T', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    cache: CacheMode,
    /// Require equal sizes and equal allocation as well
    #[arg(short, long)]
    strict: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// Read the images even if another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    keys: PassphraseArgs,
    #[command(flatten)]
    naming: NamingArgs,
}

const DIFFERENT: u8 = 1;
const NOT_OPENED: u8 = 2;
const NOT_READ: u8 = 4;
const STEP_BYTES: u64 = 1 << 20;
const TASKS: usize = 8;

pub(crate) fn run(arguments: CompareArgs) -> Result<(), CommandFailure> {
    let objects = arguments.naming.objects()?;
    let first = arguments.naming.named(&arguments.first, arguments.format, &objects)?;
    let second = arguments.naming.named(&arguments.second, arguments.second_format, &objects)?;
    objects.check_used().map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
    let mut keys = with_secrets(arguments.keys.read()?, &[&first, &second])?;
    on_reactor(async move {
        let mode =
            OpenMode { cache: arguments.cache, force_share: arguments.force_share, ..OpenMode::default() };
        let mut sources = Vec::new();
        for named in [first, second] {
            let image = named.open(mode, &mut keys).await;
            let image = image.map_err(|error| failed(&error, NOT_OPENED))?;
            sources.push(CopySource::new([(named.name(), image)]));
        }
        keys.check_used()?;
        let outcome = ImageComparison::compare_images(&sources, arguments.strict, arguments.progress).await;
        let verdict = outcome.map_err(|error| failed(&error, NOT_READ))?;
        if !arguments.progress.quiet {
            print(&verdict.text())?;
        }
        if verdict.is_same() { Ok(()) } else { Err(CommandFailure::Found(DIFFERENT)) }
    })
}

fn failed(error: &anyhow::Error, status: u8) -> CommandFailure {
    console::print_error(error);
    CommandFailure::Found(status)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompareVerdict {
    Same {
        /// True if one image is longer and its excess is zeroes.
        sizes_differ: bool,
    },
    Size,
    Content {
        at: u64,
        sizes_differ: bool,
    },
    Status {
        at: u64,
    },
}

impl CompareVerdict {
    fn is_same(self) -> bool {
        matches!(self, Self::Same { .. })
    }

    fn text(self) -> String {
        let warning = |differ| if differ { "Warning: Image size mismatch!\n" } else { "" };
        match self {
            Self::Same { sizes_differ } => format!("{}Images are identical.\n", warning(sizes_differ)),
            Self::Size => "Strict mode: Image size mismatch!\n".to_owned(),
            Self::Content { at, sizes_differ } => {
                format!("{}Content mismatch at offset {at}!\n", warning(sizes_differ))
            }
            Self::Status { at } => format!("Strict mode: Offset {at} block status mismatch!\n"),
        }
    }
}

/// State shared by the tasks. The common range is compared piece by piece, then the excess of the
/// longer image.
struct ImageComparison {
    sources: [CopySource; 2],
    progress: CommandProgress,
    /// Offset of the first difference so far: tasks take pieces in order and complete them.
    different: Cell<Option<u64>>,
    failed: RefCell<Option<anyhow::Error>>,
    queue: RefCell<VecDeque<ComparedRange>>,
}

/// A range in which each image has one kind; beyond the end of an image that is
/// [`ExtentKind::Below`].
#[derive(Clone, Copy, Debug)]
struct ComparedRange {
    offset: u64,
    length: u64,
    kinds: [ExtentKind; 2],
}

impl ImageComparison {
    async fn compare_images(
        sources: &[CopySource],
        strict: bool,
        progress_args: ProgressArgs,
    ) -> anyhow::Result<CompareVerdict> {
        let [first, second] = sources else { unreachable!("two images were opened") };
        let sizes = [first.size_bytes(), second.size_bytes()];
        let sizes_differ = sizes[0] != sizes[1];
        // As in qemu-img, strict mode fails on the sizes before it reads anything.
        if strict && sizes_differ {
            return Ok(CompareVerdict::Size);
        }
        let total = sizes[0].max(sizes[1]);
        let progress = progress_args.progress("comparing", total);
        let comparison = Rc::new(Self {
            sources: [first.clone(), second.clone()],
            progress,
            different: Cell::new(None),
            failed: RefCell::new(None),
            queue: RefCell::default(),
        });
        // Block status is queried in batches; a batch is compared before the next query.
        let mut walk = ExtentWalk::new(&comparison.sources);
        let mut status = None;
        while let Some(pieces) = walk.next().await? {
            status = pieces
                .iter()
                .find(|piece| strict && piece.kinds[0] != piece.kinds[1])
                .map(|piece| piece.offset);
            comparison.compare(pieces).await?;
            // Later batches cannot contain an earlier difference.
            if status.is_some() || comparison.different.get().is_some() {
                break;
            }
        }
        comparison.progress.end();
        Ok(match (comparison.different.get(), status) {
            // A mismatch of status precedes a difference of content at the same offset, as in
            // qemu-img.
            (Some(at), Some(status)) if status <= at => CompareVerdict::Status { at: status },
            (Some(at), _) => CompareVerdict::Content { at, sizes_differ },
            (None, Some(at)) => CompareVerdict::Status { at },
            (None, None) => CompareVerdict::Same { sizes_differ },
        })
    }

    async fn compare(self: &Rc<Self>, pieces: Vec<ComparedRange>) -> anyhow::Result<()> {
        self.queue.borrow_mut().extend(pieces);
        let tasks: Vec<_> = (0..TASKS).map(|_| spawn_joinable(Rc::clone(self).task())).collect();
        for task in tasks {
            task.await;
        }
        // An error has precedence over a difference: the piece that failed may contain an earlier
        // one.
        self.failed.borrow_mut().take().map_or(Ok(()), Err)
    }

    async fn task(self: Rc<Self>) {
        loop {
            let next = self.queue.borrow_mut().pop_front();
            let Some(piece) = next else { return };
            match self.first_difference(piece).await {
                Ok(None) => self.progress.advance(piece.length),
                Ok(Some(at)) => {
                    let earlier = self.different.get().unwrap_or(u64::MAX);
                    self.different.set(Some(earlier.min(at)));
                    // Pieces after a difference are dropped; those in progress may still find an
                    // earlier one.
                    self.queue.borrow_mut().clear();
                }
                Err(error) => {
                    self.failed.borrow_mut().get_or_insert(error);
                    self.queue.borrow_mut().clear();
                }
            }
        }
    }

    /// Offset of the first difference in a piece.
    async fn first_difference(&self, piece: ComparedRange) -> anyhow::Result<Option<u64>> {
        let length = piece.length as usize;
        let mut data = Vec::new();
        for (source, kind) in self.sources.iter().zip(piece.kinds) {
            // Zeroes and ranges beyond the end are not read.
            if kind == ExtentKind::Data {
                data.push(source.read(piece.offset, length).await?);
            }
        }
        let at = match &data[..] {
            [] => None,
            // The second image reads as zeroes here.
            [one] if is_zero(one) => None,
            [one] => one.iter().position(|&byte| byte != 0),
            [one, other, ..] if one[..] == other[..] => None,
            [one, other, ..] => one.iter().zip(&other[..]).position(|(one, other)| one != other),
        };
        Ok(at.map(|at| piece.offset + at as u64))
    }
}

struct ExtentWalk<'a> {
    sources: &'a [CopySource; 2],
    at: u64,
    /// Known lengths and kinds of each image from `at` on.
    ahead: [VecDeque<(u64, ExtentKind)>; 2],
}

impl<'a> ExtentWalk<'a> {
    fn new(sources: &'a [CopySource; 2]) -> Self {
        Self { sources, at: 0, ahead: Default::default() }
    }

    async fn next(&mut self) -> anyhow::Result<Option<Vec<ComparedRange>>> {
        let end = self.sources.iter().map(CopySource::size_bytes).max().unwrap_or(0);
        if self.at == end {
            return Ok(None);
        }
        for (source, ahead) in self.sources.iter().zip(&mut self.ahead) {
            if ahead.is_empty() {
                let left = source.size_bytes().saturating_sub(self.at);
                if left == 0 {
                    ahead.push_back((end - self.at, ExtentKind::Below));
                } else {
                    ahead.extend(source.status(self.at, left).await?);
                }
            }
        }
        let mut pieces = Vec::new();
        let [first, second] = &mut self.ahead;
        while let (Some(one), Some(other)) = (first.front_mut(), second.front_mut()) {
            // The block status of the two images rarely ends at the same offset: the shorter
            // length counts.
            let kinds = [one.1, other.1];
            let common = one.0.min(other.0);
            // Data is limited to one read, aligned to it; ranges without data are compared as a
            // whole.
            let length = if kinds.contains(&ExtentKind::Data) {
                common.min(STEP_BYTES - self.at % STEP_BYTES)
            } else {
                common
            };
            pieces.push(ComparedRange { offset: self.at, length, kinds });
            self.at += length;
            one.0 -= length;
            other.0 -= length;
            if one.0 == 0 {
                first.pop_front();
            }
            if second.front().is_some_and(|other| other.0 == 0) {
                second.pop_front();
            }
        }
        Ok(Some(pieces))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

    use super::*;
    use crate::{disk, keys::PassphraseSet};

    fn image(directory: &Path, name: &str, size: u64, data: &[(u64, &[u8])]) -> PathBuf {
        let path = directory.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(size).unwrap();
        for (at, bytes) in data {
            file.write_all_at(bytes, *at).unwrap();
        }
        path
    }

    fn verdict(first: PathBuf, second: PathBuf, strict: bool) -> CompareVerdict {
        on_reactor(async move {
            let mut sources = Vec::new();
            for path in [&first, &second] {
                let mut keys = PassphraseSet::default();
                let image = disk::open(path, Some(ImageFormat::Raw), OpenMode::default(), &mut keys).await?;
                sources.push(CopySource::new([(String::new(), image)]));
            }
            Ok(ImageComparison::compare_images(&sources, strict, ProgressArgs::default()).await?)
        })
        .unwrap()
    }

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let size = 20 << 20;
        let one = image(directory.path(), "one", size, &[(5 << 20, &[1; 300])]);
        for at in [0, (5 << 20) - 1, (5 << 20) + 299, size - 1] {
            let other =
                image(directory.path(), "other", size, &[(5 << 20, &[1; 300]), (size - 1, &[7]), (at, &[9])]);
            let expect = CompareVerdict::Content { at, sizes_differ: false };
            assert_eq!(verdict(one.clone(), other, false), expect);
        }
    }

    #[test]
    fn written_and_unwritten_zeroes_are_equal() {
        let directory = tempfile::tempdir().unwrap();
        let one = image(directory.path(), "one", 3 << 20, &[(0, &[1])]);
        let other = image(directory.path(), "other", 3 << 20, &[(0, &[1]), (1 << 20, &[0; 8192])]);
        assert_eq!(verdict(one.clone(), other.clone(), false), CompareVerdict::Same { sizes_differ: false });
        assert_eq!(verdict(one, other, true), CompareVerdict::Status { at: 1 << 20 });
    }

    #[test]
    fn excess_of_the_larger_image_must_be_zero() {
        let directory = tempfile::tempdir().unwrap();
        let one = image(directory.path(), "one", 1 << 20, &[]);
        let longer = image(directory.path(), "longer", 3 << 20, &[]);
        let other = image(directory.path(), "other", 3 << 20, &[(2 << 20, &[0, 1])]);
        assert_eq!(verdict(one.clone(), longer.clone(), false), CompareVerdict::Same { sizes_differ: true });
        assert_eq!(verdict(longer, one.clone(), true), CompareVerdict::Size);
        let expect = CompareVerdict::Content { at: (2 << 20) + 1, sizes_differ: true };
        assert_eq!(verdict(other, one, false), expect);
    }
}

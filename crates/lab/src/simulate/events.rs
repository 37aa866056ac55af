//! `--events`: every request's result, as CSV that is a trace again.
//!
//! Rows are in the order in which requests passed the limits. They go to a temporary file that is
//! renamed at the end, so a simulation that fails at its start leaves the old file. A full disk
//! ends the writing and not the simulation. Inputs are never overwritten.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use tempfile::NamedTempFile;

use super::{bucket::Bucket, engine::Row, world::World};
use crate::{
    trace,
    trace::{push_decimal, push_request, quoted},
};

const MORE_COLUMNS: &str = ",admitted_ns,completed_ns,bucket\n";
const BLOCK_BYTES: usize = 1 << 18;
/// Before the process's mask.
const NEW_FILE: u32 = 0o666;

#[derive(Debug)]
pub(crate) struct Events {
    out: Out,
    name: String,
    text: Vec<u8>,
    failed: Option<io::Error>,
    disks: Vec<Named>,
}

#[derive(Debug)]
enum Out {
    /// Renamed at the end.
    Beside(NamedTempFile, PathBuf),
    /// No regular file: a pipe, a terminal.
    InPlace(File),
}

#[derive(Debug)]
struct Named {
    disk: String,
    buckets: Vec<(Bucket, String)>,
}

impl Events {
    /// `inputs` are the simulation's, which are refused as the output.
    pub(crate) fn create<'a>(
        path: &Path,
        inputs: impl IntoIterator<Item = &'a PathBuf>,
    ) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let cannot = || format!("{name}: cannot be written");
        // A link stays one: its target is replaced.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let earlier = fs::metadata(&target).ok();
        if let Some(earlier) = &earlier {
            let is_same = |input: &&PathBuf| {
                fs::metadata(input)
                    .is_ok_and(|input| (input.dev(), input.ino()) == (earlier.dev(), earlier.ino()))
            };
            if let Some(input) = inputs.into_iter().find(is_same) {
                bail!("--events: {name} is {}, which is read (name another file)", input.display());
            }
        }
        let out = if earlier.as_ref().is_some_and(|earlier| !earlier.is_file()) {
            Out::InPlace(File::options().write(true).open(&target).with_context(cannot)?)
        } else {
            let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty());
            let file = tempfile::Builder::new()
                .prefix(".weir-events.")
                .permissions(Permissions::from_mode(NEW_FILE))
                .tempfile_in(directory.unwrap_or(Path::new(".")))
                .with_context(cannot)?;
            if let Some(earlier) = earlier {
                let _ = file.as_file().set_permissions(earlier.permissions());
            }
            Out::Beside(file, target)
        };
        let text = [trace::HEADER, MORE_COLUMNS].concat().into_bytes();
        Ok(Self { out, name, text, failed: None, disks: Vec::new() })
    }

    /// Errors are reported by [`finish`](Self::finish).
    pub(crate) fn write(&mut self, world: &World, rows: impl Iterator<Item = Row>) {
        for disk in &world.disks[self.disks.len()..] {
            self.disks.push(Named { disk: quoted(&disk.name).into_owned(), buckets: Vec::new() });
        }
        for row in rows {
            self.add(world, &row);
            if self.text.len() >= BLOCK_BYTES {
                self.flush();
            }
        }
    }

    /// Writes the rest and renames the file; after an error, an old regular file stays.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        self.flush();
        let Self { out, name, failed, .. } = self;
        let written = match (failed, out) {
            (Some(error), _) => Err(error),
            (None, Out::Beside(file, target)) => file.persist(target).map(drop).map_err(|error| error.error),
            (None, Out::InPlace(_)) => Ok(()),
        };
        written.with_context(|| format!("{name}: cannot be written"))
    }

    fn flush(&mut self) {
        let written = match &mut self.out {
            _ if self.failed.is_some() => Ok(()),
            Out::Beside(file, _) => file.as_file_mut().write_all(&self.text),
            Out::InPlace(file) => file.write_all(&self.text),
        };
        self.failed = self.failed.take().or(written.err());
        self.text.clear();
    }

    fn add(&mut self, world: &World, row: &Row) {
        let Row { request, admitted_ns, completed_ns, bucket } = *row;
        let Named { disk, buckets } = &mut self.disks[request.disk];
        let at = buckets.iter().position(|(known, _)| *known == bucket).unwrap_or_else(|| {
            let groups = world.groups_above(&world.disks[request.disk]);
            let groups: Vec<_> = groups.map(|group| world.groups[group].name.as_str()).collect();
            buckets.push((bucket, quoted(&bucket.name(&groups)).into_owned()));
            buckets.len() - 1
        });
        let text = &mut self.text;
        push_request(text, request.at_ns, disk, request.op, request.offset, request.length);
        for value in [admitted_ns, completed_ns] {
            text.push(b',');
            push_decimal(text, value);
        }
        text.push(b',');
        text.extend(buckets[at].1.as_bytes());
        text.push(b'\n');
    }
}

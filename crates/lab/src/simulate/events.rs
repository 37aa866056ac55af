//! `--events`: every request's result, as CSV that is a valid trace.
//!
//! Rows are in the order of admission. They go to a temporary file that is renamed at the end, so a
//! simulation that fails at its start keeps the old file. A full disk ends the writing but not the
//! simulation. Inputs are never overwritten.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use recording::{
    push_decimal,
    write::{push_request, quoted},
};
use simulator::{bucket::LimitingBucket, engine::ResultRow, world::WorldSpec};

use crate::trace::TraceOutput;

const BLOCK_BYTES: usize = 1 << 18;

#[derive(Debug)]
pub(crate) struct EventsFile {
    out: TraceOutput,
    name: String,
    text: Vec<u8>,
    failed: Option<io::Error>,
    disks: Vec<DiskNames>,
}

#[derive(Debug)]
struct DiskNames {
    disk: String,
    /// The groups above it, innermost first.
    groups: Vec<String>,
    buckets: Vec<(LimitingBucket, String)>,
}

impl EventsFile {
    /// Creates the file; rejects a path that is one of the `inputs`.
    pub(crate) fn create<'a>(
        path: &Path,
        inputs: impl IntoIterator<Item = &'a PathBuf>,
    ) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let out = TraceOutput::create("--events", path, inputs)?;
        let text = [recording::HEADER, recording::MORE_COLUMNS, "\n"].concat().into_bytes();
        Ok(Self { out, name, text, failed: None, disks: Vec::new() })
    }

    /// Adds the names of disks that are new in `world`. Must be called before the first row of a
    /// new disk is written.
    pub(crate) fn follow(&mut self, world: &WorldSpec) {
        for disk in &world.disks[self.disks.len()..] {
            let groups = world.groups_above(disk).map(|group| world.groups[group].name.clone()).collect();
            self.disks.push(DiskNames { disk: quoted(&disk.name).into_owned(), groups, buckets: Vec::new() });
        }
    }

    /// Errors are reported by [`finish`](Self::finish).
    pub(crate) fn write(&mut self, rows: &[ResultRow]) {
        for row in rows {
            self.add(row);
            if self.text.len() >= BLOCK_BYTES {
                self.flush();
            }
        }
    }

    /// Writes the rest and renames the file; after an error, an old regular file stays.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        self.flush();
        let Self { out, name, failed, .. } = self;
        let written = failed.map_or_else(|| out.finish(), Err);
        written.with_context(|| format!("{name}: cannot be written"))
    }

    fn flush(&mut self) {
        // After the first error nothing more is written; later rows are dropped.
        let is_lost = self.failed.is_some();
        let written = if is_lost { Ok(()) } else { self.out.write_all(&self.text) };
        self.failed = self.failed.take().or(written.err());
        self.text.clear();
    }

    fn add(&mut self, row: &ResultRow) {
        let ResultRow { request, admitted_ns, completed_ns, bucket } = *row;
        let DiskNames { disk, groups, buckets } = &mut self.disks[request.disk];
        // Quoted names are cached: a disk has few limits, and quoting their names for each row
        // would dominate the cost.
        let at = buckets.iter().position(|(known, _)| *known == bucket).unwrap_or_else(|| {
            let groups: Vec<_> = groups.iter().map(String::as_str).collect();
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

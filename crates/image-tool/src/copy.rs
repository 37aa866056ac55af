//! Copies the content of one image into another with many requests in flight: the engine of
//! `convert` and `commit`.
//!
//! ```text
//!   scan of the source ─► block status ─► items ─► tasks on several threads:
//!                                                  read ─► skip zeroes ─► wait for order ─► write
//! ```
//!
//! The scan queries the block status ahead of the tasks, so holes cost nothing. Tasks take items as
//! they become available; if writes must be in order, reads still run ahead.
//!
//! Never writes outside the requested range. Ends with the first error; the content of the target
//! is then undefined.

mod plan;
mod write_order;

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::Context as _;
use async_channel::{Receiver, Sender};
use image::Image;
use reactor::{
    PollingMode, ReactorWorker,
    buffer::{IoBuffer, zero},
    error::Error,
};
use storage::{Durability, ZeroOptions};

use self::{plan::CopyItem, write_order::WriteOrder};
use super::{disk::ExtentKind, progress::CommandProgress, source::CopySource};

const MAX_THREADS: usize = 4;
const SALVAGED_BYTES: usize = 4096;
/// Size of a block of the target from which on ordered writes overlap: each starts after the one
/// before has started. Two writes may then allocate clusters alternately, which matters for small
/// ones: with 4 KiB there were twice as many fragments.
const LEAST_OVERLAPPED: u64 = 32 << 10;

#[derive(Clone, Copy, Debug)]
pub(super) struct CopyOptions {
    /// Number of items in flight; not 0.
    pub(super) tasks: usize,
    pub(super) in_order: bool,
    pub(super) compressed: bool,
    /// True if unwritten parts of the target read as zeroes, so zeroes need not be written.
    pub(super) target_is_zero: bool,
    /// True if zeroes must hide a backing file that the target does not name yet.
    pub(super) hides_backing: bool,
    /// True if space that becomes zeroes may be deallocated in the target.
    pub(super) may_unmap: bool,
    /// Minimum length of a run of zeroes that is skipped. 0 skips none, and reads even ranges that
    /// the source reports as zero.
    pub(super) sparse: usize,
    /// Alignment of skipped ranges: block or cluster size of the target, a power of two.
    pub(super) grain: usize,
    /// Data is copied in blocks of this size, 1 or the grain, even if only part of a block is
    /// allocated.
    pub(super) align: u64,
    /// Size limit of an item in bytes; a multiple of the grain, and a cluster if the target is
    /// compressed.
    pub(super) unit: u64,
    pub(super) salvage: bool,
    pub(super) quiet: bool,
}

/// A part of a [`CopyItem`] that is to be written; without data, as zeroes.
struct CopyPart {
    range: Range<u64>,
    data: Option<IoBuffer>,
}

#[derive(Debug)]
struct ImageCopy {
    source: CopySource,
    target: Arc<Image>,
    options: CopyOptions,
    progress: Arc<CommandProgress>,
    write_order: WriteOrder,
    failed: Mutex<Option<anyhow::Error>>,
}

pub(super) async fn copy(
    source: CopySource,
    target: Arc<Image>,
    how: CopyOptions,
    progress: Arc<CommandProgress>,
) -> anyhow::Result<()> {
    // Reads and writes are asynchronous; threads only spread compression and the search for
    // zeroes.
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(how.tasks);
    let workers = (0..threads)
        .map(|number| ReactorWorker::start(&format!("copy {number}"), PollingMode::Off))
        .collect::<Result<Vec<_>, _>>()
        .context(console::NO_RING)?;
    let failed = Mutex::new(None);
    let copy = Arc::new(ImageCopy {
        source,
        target,
        options: how,
        progress,
        write_order: WriteOrder::default(),
        failed,
    });
    // Bounded: the scan waits when it is far ahead of the tasks.
    let (items, incoming) = async_channel::bounded(2 * how.tasks);
    // Bounded by the number of tasks, so that sending the end never waits.
    let (end, task_ends) = async_channel::bounded::<()>(how.tasks);
    for number in 0..how.tasks {
        let (copy, incoming, end) = (Arc::clone(&copy), incoming.clone(), end.clone());
        workers[number % threads].spawn(move || async move {
            copy.task(&incoming).await;
            let _ = end.send(()).await;
        });
    }
    // The receivers live in the tasks only, so that `scan_source` notices when all of them ended.
    drop((incoming, end));
    let scan_result = copy.scan_source(items).await;
    // Also after an error: workers must not stop while a task has a request in flight.
    for _ in 0..how.tasks {
        let _ = task_ends.recv().await;
    }
    for worker in workers {
        worker.stop().context("a worker ended with an error")?;
    }
    let failed = copy.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
    failed.map_or(scan_result, Err)
}

impl ImageCopy {
    /// Walks through the source and sends items. Ends early if all tasks have ended.
    async fn scan_source(&self, items: Sender<(u64, CopyItem)>) -> anyhow::Result<()> {
        let size = self.source.size_bytes();
        let mut planner = plan::CopyPlanner::new(size, self.options.align, self.options.unit);
        let (mut at, mut number, mut reported) = (0, 0, 0);
        let mut ready = Vec::new();
        while at < size {
            // Three cases: a full copy of one layer, a full copy of the disk, and the usual copy
            // without zeroes.
            if let Some(below_bytes) = self.source.below_bytes()
                && self.options.sparse == 0
            {
                // Data of the layer, and its zeroes where they hide data below. Unallocated ranges
                // are not copied.
                for (length, kind) in self.source.status(at, size - at).await? {
                    let end = at + length;
                    let hidden = if kind == ExtentKind::Zero { below_bytes.clamp(at, end) } else { at };
                    for (range, kind) in [(at..hidden, ExtentKind::Data), (hidden..end, kind)] {
                        self.plan(&mut planner, range, kind, &mut ready);
                    }
                    at = end;
                }
            } else if self.options.sparse == 0 {
                let end = size.min(at + self.options.unit);
                planner.add_piece(at..end, ExtentKind::Data, &mut ready);
                at = end;
            } else {
                for (length, kind) in self.source.status(at, size - at).await? {
                    self.plan(&mut planner, at..at + length, kind, &mut ready);
                    at += length;
                }
            }
            if at == size {
                planner.finish(&mut ready);
            }
            for item in ready.drain(..) {
                // Ranges that no item covers, such as those of a backing file, count as done.
                self.progress.advance(item.range.start - reported);
                reported = item.range.end;
                // Nothing to do: the target already reads as zeroes there.
                if item.kind == ExtentKind::Zero && self.options.target_is_zero {
                    self.progress.advance(item.range.end - item.range.start);
                    continue;
                }
                if items.send((number, item)).await.is_err() {
                    return Ok(());
                }
                number += 1;
            }
        }
        self.progress.advance(size - reported);
        Ok(())
    }

    /// Adds a range to the plan. Zeroes that must hide a backing file can do so in whole clusters;
    /// the rest of a cluster is copied as data.
    fn plan(
        &self,
        planner: &mut plan::CopyPlanner,
        range: Range<u64>,
        kind: ExtentKind,
        ready: &mut Vec<CopyItem>,
    ) {
        // A partial cluster cannot become a zero cluster: the rest of it is data, or is in the
        // backing file.
        let aligned = match kind {
            ExtentKind::Zero if self.options.hides_backing => self.whole_clusters(range.clone()),
            _ => range.clone(),
        };
        let (before, after) = (range.start..aligned.start, aligned.end..range.end);
        for (range, kind) in [(before, ExtentKind::Data), (aligned, kind), (after, ExtentKind::Data)] {
            if !range.is_empty() {
                planner.add_piece(range, kind, ready);
            }
        }
    }

    async fn task(&self, incoming: &Receiver<(u64, CopyItem)>) {
        while let Ok((number, item)) = incoming.recv().await {
            if let Err(error) = self.item(number, item).await {
                self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                // Stops the scan and all tasks, including those that wait to write.
                incoming.close();
                self.write_order.end();
                return;
            }
        }
    }

    async fn item(&self, number: u64, item: CopyItem) -> anyhow::Result<()> {
        let Range { start, end } = item.range;
        let data = match item.kind {
            ExtentKind::Data => Some(self.read(start, (end - start) as usize).await?),
            ExtentKind::Zero | ExtentKind::Below => None,
        };
        let mut parts = self.parts(start..end, data);
        // Waits after the read: reads overlap.
        if self.options.in_order && !self.write_order.wait(number).await {
            return Ok(());
        }
        let last = parts.pop();
        for part in parts {
            self.write_part(part).await?;
        }
        let last = async { if let Some(part) = last { self.write_part(part).await } else { Ok(()) } };
        if self.options.in_order && self.options.align >= LEAST_OVERLAPPED {
            self.write_order.start(last).await?;
        } else {
            last.await?;
            // No task waits for its turn if writes are not in order.
            self.write_order.advance();
        }
        self.progress.advance(end - start);
        Ok(())
    }

    async fn read(&self, offset: u64, length: usize) -> anyhow::Result<IoBuffer> {
        let read = self.source.read(offset, length).await;
        match read {
            Ok(data) => Ok(data),
            Err(_) if self.options.salvage => Ok(self.read_sector_wise(offset, length).await),
            Err(error) => Err(error),
        }
    }

    async fn read_sector_wise(&self, offset: u64, length: usize) -> IoBuffer {
        // Small pieces, so that a bad sector loses as little as possible.
        let mut data = IoBuffer::zeroed(length);
        for (number, part) in data.chunks_mut(SALVAGED_BYTES).enumerate() {
            let at = offset + (number * SALVAGED_BYTES) as u64;
            match self.source.read(at, part.len()).await {
                Ok(read) => part.copy_from_slice(&read),
                Err(_) if self.options.quiet => {}
                Err(error) => console::print_error(&anyhow::anyhow!("{error:#} (zeroes are written there)")),
            }
        }
        data
    }

    /// Divides an item into data and zeroes that have to be written. The source may store zeroes as
    /// data, which its block status does not show.
    fn parts(&self, range: Range<u64>, data: Option<IoBuffer>) -> Vec<CopyPart> {
        let mut data = match data {
            Some(data) if self.options.sparse > 0 => data,
            data => return vec![CopyPart { range, data }],
        };
        let mut at = range.start;
        let mut parts = Vec::new();
        for (part, is_data) in zero::runs(&data, at, self.options.grain, self.options.sparse) {
            let rest = data.split_off(part.len());
            let end = at + part.len() as u64;
            if is_data {
                parts.push(CopyPart { range: at..end, data: Some(data) });
            } else if !self.options.target_is_zero {
                parts.push(CopyPart { range: at..end, data: None });
            }
            data = rest;
            at = end;
        }
        parts
    }

    async fn write_part(&self, CopyPart { range, data }: CopyPart) -> anyhow::Result<()> {
        match data {
            Some(data) => self.write(range.start, data).await,
            None => self.zero(range.start, range.end - range.start).await,
        }
    }

    async fn write(&self, offset: u64, data: IoBuffer) -> anyhow::Result<()> {
        let length = data.len();
        let range = offset..offset + length as u64;
        // Only whole clusters can be compressed. The source may end inside a cluster.
        let written = if self.options.compressed && self.whole_clusters(range.clone()) == range {
            super::disk::write_compressed(&self.target, offset, data.into()).await
        } else {
            self.target.write(offset, data.into(), Durability::Cached).await
        };
        written.with_context(|| format!("writing {length} bytes at {offset}"))
    }

    /// Writes zeroes that stay zeroes when the target gets a backing file: zero clusters as far as
    /// possible, data otherwise.
    async fn write_persistent_zeroes(&self, offset: u64, length: u64) -> anyhow::Result<()> {
        let end = offset + length;
        let aligned = self.whole_clusters(offset..end);
        let hidden = match &*self.target {
            Image::Qcow2(qcow2) if !aligned.is_empty() => {
                match qcow2.write_zero_clusters(aligned.start, aligned.end - aligned.start).await {
                    Ok(()) => aligned,
                    // Version 2 has no zero clusters.
                    Err(Error::UNSUPPORTED) => end..end,
                    Err(error) => {
                        return Err(error).with_context(|| format!("zeroing {length} bytes at {offset}"));
                    }
                }
            }
            _ => end..end,
        };
        for part in [offset..hidden.start, hidden.end..end] {
            self.write_zero_data(part).await?;
        }
        Ok(())
    }

    /// Blocks of [`CopyOptions::align`] bytes that are inside a range. The last block of the target
    /// may be shorter.
    fn whole_clusters(&self, range: Range<u64>) -> Range<u64> {
        let (end, align) = (range.end, self.options.align);
        let last = if end == self.target.size_bytes() { end } else { end - end % align };
        let first = range.start.next_multiple_of(align).min(end);
        first..last.max(first)
    }

    /// Writes zeroes as data, in pieces of the size of an item.
    async fn write_zero_data(&self, range: Range<u64>) -> anyhow::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let next = range.end.min((at + 1).next_multiple_of(self.options.unit));
            self.write(at, IoBuffer::zeroed((next - at) as usize)).await?;
            at = next;
        }
        Ok(())
    }

    async fn zero(&self, offset: u64, length: u64) -> anyhow::Result<()> {
        if self.options.hides_backing {
            return self.write_persistent_zeroes(offset, length).await;
        }
        let may_unmap = self.options.may_unmap;
        let mut options = ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
        let context = || format!("zeroing {length} bytes at {offset}");
        if self.options.compressed {
            // First without writing zeroes. Otherwise whole clusters are written compressed.
            options.only_if_fast = true;
            match self.target.write_zeroes(offset, length, options).await {
                Err(Error::UNSUPPORTED) => options.only_if_fast = false,
                done => return done.with_context(context),
            }
            let end = offset + length;
            let aligned = self.whole_clusters(offset..end);
            self.write_zero_data(aligned.clone()).await?;
            for part in [offset..aligned.start, aligned.end..end] {
                if !part.is_empty() {
                    let length = part.end - part.start;
                    self.target.write_zeroes(part.start, length, options).await.with_context(context)?;
                }
            }
            return Ok(());
        }
        self.target.write_zeroes(offset, length, options).await.with_context(context)
    }
}

//! Counters of one control group on one device, read from files that stay open.
//!
//! io.stat counts I/O that has passed the limits. Waiting shows in io.pressure, or in memory.stat
//! if only writeback waits (measured: io.pressure does not grow then). Reading an open file costs a
//! tenth of opening it. Files of a removed cgroup return ENODEV for ever and are then reopened.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use anyhow::Context as _;
use block::device::DeviceNumber;
use nix::errno::Errno;
use policy::{steering::IoCounters, throttle::AdmissionCounters};

use crate::{
    control_group::ControlGroup,
    kernel::{io_stat, memory_stat, pressure},
    limit::write::file_context,
};

/// Bytes of a file that are read: enough for io.stat of several hundred devices.
const MAX_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct OpenCgroupFiles {
    stat: File,
    pressure: Option<File>,
    memory: Option<File>,
    /// Total waiting time at the last reading.
    stalled_us: Option<u64>,
}

impl OpenCgroupFiles {
    /// Opens the files; io.pressure and memory.stat only if `wants_waiting`, because a process may
    /// have only a thousand open files.
    pub(super) fn open(group: &ControlGroup, wants_waiting: bool) -> anyhow::Result<Self> {
        let open = |file: &str| File::open(group.directory.join(file));
        let stat = open("io.stat").with_context(|| file_context(group, "io.stat"))?;
        let optional = |file: &str| if wants_waiting { open(file).ok() } else { None };
        Ok(Self {
            stat,
            pressure: optional("io.pressure"),
            memory: optional("memory.stat"),
            stalled_us: None,
        })
    }

    /// Reads the counters on a device, and whether a task waited since the last reading; `buffer`
    /// is scratch space.
    pub(super) fn read(
        &mut self,
        device: DeviceNumber,
        buffer: &mut Vec<u8>,
    ) -> anyhow::Result<(IoCounters, Option<bool>)> {
        let usage = io_stat::find(text(&self.stat, buffer)?, device)?.unwrap_or_default();
        let counters =
            |requests, bytes| AdmissionCounters { requests, bytes, ..AdmissionCounters::default() };
        let passed = [
            counters(usage.reads, usage.read_bytes),
            // Without discards, each of which the kernel's limits charge as 512 bytes
            // (block/blk-throttle.c, throtl_bio_data_size).
            counters(usage.writes, usage.written_bytes),
        ];
        Ok((passed, self.waited(buffer)))
    }

    /// `None` if the kernel lacks io.pressure: steering then reacts more slowly.
    fn waited(&mut self, buffer: &mut Vec<u8>) -> Option<bool> {
        let text_of_pressure = text(self.pressure.as_ref()?, buffer).ok()?;
        let total = pressure::parse(text_of_pressure).ok()?.some.total_us;
        let before = self.stalled_us.replace(total);
        if before.is_some_and(|before| total > before) {
            return Some(true);
        }
        let Some(memory) = &self.memory else { return Some(false) };
        let waiting = memory_stat::parse(text(memory, buffer).unwrap_or_default());
        Some(waiting.is_ok_and(|waiting| waiting.writeback > 0))
    }
}

/// True for the error of an open file of a removed cgroup.
pub(super) fn is_removed(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    error == Some(Errno::ENODEV as i32)
}

fn text<'a>(file: &File, buffer: &'a mut Vec<u8>) -> anyhow::Result<&'a str> {
    buffer.resize(MAX_BYTES, 0);
    let mut length = 0;
    while length < MAX_BYTES {
        match file.read_at(&mut buffer[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        // The kernel returns up to a page per read; a partial page is the end of the file.
        if length % 4096 != 0 {
            break;
        }
    }
    Ok(std::str::from_utf8(&buffer[..length])?)
}

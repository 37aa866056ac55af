//! Formats of traces: detection, and parsing of a line.
//!
//! | Format | Source |
//! | --- | --- |
//! | [`weir`] | weir's own |
//! | [`fio`] | `fio --write_iolog`, versions 2 and 3 |
//! | [`blkparse`] | blktrace's `blkparse`, its default text |
//! | [`msr`] | Microsoft Research's servers in Cambridge |
//! | [`alibaba`] | Alibaba's block traces |
//! | [`cloud_physics`] | CSV of CloudPhysics' traces, from libCacheSim |
//! | [`spc`] | Storage Performance Council |
//! | [`mqsim`] | MQSim and SSDsim |
//! | [`columns`] | any other text, by its columns |
//!
//! `docs/reference/traces.md` describes the fields of each and names the specification.
//!
//! A parser sees one line at a time. Times are those of the trace's clock; the reader makes them
//! relative.

mod alibaba;
mod blkparse;
mod cloud_physics;
mod columns;
mod detect;
mod fio;
mod mqsim;
mod msr;
mod spc;
mod weir;

use clap::ValueEnum;

pub(super) use self::{
    alibaba::Alibaba,
    blkparse::Blkparse,
    cloud_physics::CloudPhysics,
    columns::ByColumns,
    detect::detect,
    fio::Fio,
    mqsim::Mqsim,
    msr::Msr,
    spc::Spc,
    weir::{WeirCsv, has_outcomes},
};
pub use self::{
    columns::ColumnSpec,
    fio::MIN_WAIT_US,
    msr::{TICK_NS, TICKS_OF_1970},
    weir::{HEADER, MORE_COLUMNS},
};
use super::{
    disks::TraceDisks,
    outcome::Outcomes,
    record::{RequestOp, TraceRecord},
    window::ReorderWindow,
};

/// Format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// weir's CSV: time_ns,disk,op,offset,length
    Weir,
    /// fio's iolog, version 2
    FioV2,
    /// fio's iolog, version 3
    FioV3,
    /// The text of blkparse
    Blkparse,
    /// CSV of Microsoft Research, Cambridge
    Msr,
    /// CSV of Alibaba's block traces
    Alibaba,
    /// CSV of CloudPhysics' traces, in libCacheSim's form
    CloudPhysics,
    /// CSV of the Storage Performance Council
    Spc,
    /// The text of MQSim and SSDsim
    Mqsim,
    /// weir's binary form, with the limit that each request waited for
    Recording,
    /// Columns given by `--columns`
    #[value(skip)]
    Columns,
}

impl TraceFormat {
    /// Name in messages and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weir => "weir",
            Self::FioV2 => "fio-v2",
            Self::FioV3 => "fio-v3",
            Self::Blkparse => "blkparse",
            Self::Msr => "msr",
            Self::Alibaba => "alibaba",
            Self::CloudPhysics => "cloud-physics",
            Self::Spc => "spc",
            Self::Mqsim => "mqsim",
            Self::Recording => "recording",
            Self::Columns => "columns",
        }
    }

    /// True if its times come from a clock that other traces share.
    pub(super) fn is_absolute(self) -> bool {
        matches!(self, Self::Weir | Self::Msr | Self::Alibaba | Self::Recording)
    }
}

pub(super) trait LineParser {
    /// Parses one nonempty line and passes on its requests. The caller adds the location to
    /// errors.
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String>;
}

pub(super) struct RecordOutput<'a> {
    pub(super) disks: &'a mut TraceDisks,
    pub(super) window: &'a mut ReorderWindow,
    /// Receives the outcomes of requests, if they were requested.
    pub(super) outcomes: Option<&'a mut Outcomes>,
    /// Number of requests of length 0 so far, which are skipped; `None` if such a request is an
    /// error.
    pub(super) empty: Option<&'a mut u64>,
    pub(super) line: u64,
}

impl RecordOutput<'_> {
    /// Passes on a request. Offset and length of a flush are ignored. Foreign traces may contain
    /// requests of length 0, which are skipped.
    #[inline(always)]
    pub(super) fn push(
        &mut self,
        time_ns: u64,
        disk: &[u8],
        op: RequestOp,
        offset: u64,
        length: u64,
    ) -> Result<(), String> {
        let (offset, length) = if op == RequestOp::Flush { (0, 0) } else { (offset, length) };
        if (length == 0 && op != RequestOp::Flush) || offset.checked_add(length).is_none() {
            return self.no_request(op, offset, length);
        }
        let disk = self.disks.id(disk)?;
        self.window.push(TraceRecord { time_ns, offset, length, line: self.line, disk, file: 0, op })
    }

    #[cold]
    fn no_request(&mut self, op: RequestOp, offset: u64, length: u64) -> Result<(), String> {
        match (length, &mut self.empty) {
            (0, Some(empty)) => {
                **empty += 1;
                Ok(())
            }
            (0, None) => Err(format!("the length of a {} is 0", op.name())),
            _ => Err(format!("offset {offset} and length {length} together do not fit into 64 bits")),
        }
    }
}

#[inline]
fn nanoseconds(time: u64, unit_ns: u64) -> Result<u64, String> {
    time.checked_mul(unit_ns)
        .ok_or_else(|| format!("the time {time} does not fit into 64 bits of nanoseconds"))
}

#[inline]
fn bytes(sectors: u64) -> Result<u64, String> {
    sectors
        .checked_mul(SECTOR_BYTES)
        .ok_or_else(|| format!("sector {sectors} does not fit into 64 bits of bytes"))
}

/// Size of a sector in bytes, in formats that count sectors.
pub const SECTOR_BYTES: u64 = 512;

// File name without directories and extensions.
fn stem(file: &str) -> &str {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.find('.').filter(|&at| at > 0).map_or(name, |at| &name[..at])
}

fn is_header(line: &[u8], header: &str) -> bool {
    line.get(..header.len()).is_some_and(|start| start.eq_ignore_ascii_case(header.as_bytes()))
}

#[derive(Default)]
struct FirstLine {
    is_past: bool,
}

impl FirstLine {
    // Must be called for every line.
    #[inline]
    fn is_header(&mut self, line: &[u8], header: &str) -> bool {
        !std::mem::replace(&mut self.is_past, true) && is_header(line, header)
    }
}

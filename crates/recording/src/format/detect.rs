//! Detects the format of a trace from its beginning.
//!
//! Never uses the file's name: names of traces vary, and standard input has none.

use clap::ValueEnum as _;

use super::{
    super::{error::shown, file},
    TraceFormat, alibaba, blkparse, cloud_physics, fio, mqsim, msr, spc, weir,
};

// blkparse prints messages before its first event.
const LINES: usize = 64;

// Offset, signature and advice for files that are often mistaken for traces.
const FOREIGN_FORMATS: [(usize, &[u8], &str); 5] = [
    (0, b"\xfd7zXZ\0", "it is compressed with xz (decompress it first: xz -dc FILE, with - as the trace)"),
    (0, b"BZh", "it is compressed with bzip2 (decompress it first: bzip2 -dc FILE, with - as the trace)"),
    (0, b"PK\x03\x04", "it is a zip archive (extract the trace first: unzip -p FILE, with - as the trace)"),
    // BLK_IO_TRACE_MAGIC of linux/blktrace_api.h, little-endian, after the version.
    (
        1,
        b"tae",
        "it is blktrace's binary form (convert it to text first: blkparse -i FILE, with - as the trace)",
    ),
    // POSIX ustar.
    (257, b"ustar", "it is a tar archive (extract the trace first: tar -xOf FILE, with - as the trace)"),
];

/// Detects the format; `ahead` is the beginning of the trace. The error describes the file that it
/// is instead.
pub(in super::super) fn detect(ahead: &[u8]) -> Result<TraceFormat, String> {
    if file::is_beginning(ahead) {
        return Ok(TraceFormat::Recording);
    }
    // First: text inside an archive may look like a trace.
    if let Some(reason) = foreign_format(ahead) {
        return Err(reason.to_owned());
    }
    let mut lines =
        ahead.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    // From the most specific format to the least: the later ones accept more lines.
    if let Some(&(_, version)) = fio::HEADERS.iter().find(|(header, _)| first == header.as_bytes()) {
        return Ok(if version == 2 { TraceFormat::FioV2 } else { TraceFormat::FioV3 });
    }
    if weir::header(first).is_some() {
        return Ok(TraceFormat::Weir);
    }
    if msr::is_line(first) {
        return Ok(TraceFormat::Msr);
    }
    if alibaba::is_line(first) {
        return Ok(TraceFormat::Alibaba);
    }
    if cloud_physics::columns(first).is_some() {
        return Ok(TraceFormat::CloudPhysics);
    }
    if spc::is_line(first) {
        return Ok(TraceFormat::Spc);
    }
    if mqsim::is_line(first) {
        return Ok(TraceFormat::Mqsim);
    }
    let mut lines =
        std::iter::once(first).chain(lines).take(LINES).skip_while(|line| blkparse::is_preface(line));
    if lines.next().is_some_and(blkparse::is_event) {
        return Ok(TraceFormat::Blkparse);
    }
    let known: Vec<_> = TraceFormat::value_variants().iter().map(|format| format.name()).collect();
    Err(format!(
        "its first line is {} (--format names the format, one of {}; --columns reads any other text)",
        shown(first),
        known.join(", ")
    ))
}

fn foreign_format(ahead: &[u8]) -> Option<&'static str> {
    let at = |place: usize, magic: &[u8]| ahead.get(place..).is_some_and(|rest| rest.starts_with(magic));
    FOREIGN_FORMATS.iter().find(|&&(place, magic, _)| at(place, magic)).map(|&(_, _, reason)| reason)
}

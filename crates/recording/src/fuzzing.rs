//! Entry point of the fuzz target for traces of arbitrary bytes, and the properties that must
//! hold.

use std::io::Cursor;

use clap::ValueEnum as _;

use super::{
    error::TraceError,
    file,
    format::TraceFormat,
    reader::{TraceOptions, TraceReader},
    record::{RequestOp, TraceRecord},
    write::CsvWriter,
};

const MAX_ERROR_BYTES: usize = 1024;
const NAME: &str = "fuzz";

/// Reads `data` as a trace. Its first byte selects the format (or detection) and the size of the
/// window.
pub fn trace(data: &[u8]) {
    let Some((&choice, text)) = data.split_first() else { return };
    let formats = TraceFormat::value_variants();
    let format = formats.get(usize::from(choice & 15)).copied();
    let options =
        TraceOptions { format, window: usize::from(choice >> 4), outcomes: true, ..TraceOptions::default() };
    let (records, disks, error) = read(text, &options);
    if let Some(error) = error {
        let error = error.to_string();
        assert!(error.starts_with(NAME) && error.len() < MAX_ERROR_BYTES, "{} bytes", error.len());
    }
    check(&records, disks.len());
    check_round_trip(&records, &disks);
    // Checksums would keep damaged bytes from the decoder of blocks, so it is called directly.
    file::check_block(text);
}

fn read(text: &[u8], options: &TraceOptions) -> (Vec<TraceRecord>, Vec<String>, Option<TraceError>) {
    let mut reader = match TraceReader::new(NAME, Box::new(Cursor::new(text.to_vec())), options) {
        Ok(reader) => reader,
        Err(error) => return (Vec::new(), Vec::new(), Some(error)),
    };
    let mut records = Vec::new();
    let error = loop {
        match reader.next() {
            Ok(Some(record)) => {
                let numbered = reader.outcome(&record);
                let outcome = numbered.and_then(|numbered| reader.named(numbered));
                assert!(outcome.is_none_or(|outcome| outcome.limit != Some("")), "no name is empty");
                records.push(record);
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };
    if error.is_some() {
        assert!(matches!(reader.next(), Ok(None)), "an error is said once");
    }
    (records, reader.disks().to_vec(), error)
}

fn check(records: &[TraceRecord], disks: usize) {
    assert!(records.first().is_none_or(|first| first.time_ns == 0));
    assert!(records.is_sorted_by_key(|record| record.time_ns));
    for record in records {
        assert!(record.disk.index() < disks && record.line > 0);
        assert!((record.length == 0) == (record.op == RequestOp::Flush));
        assert!(record.offset.checked_add(record.length).is_some());
    }
}

fn check_round_trip(records: &[TraceRecord], disks: &[String]) {
    let mut writer = CsvWriter::new(Vec::new());
    for record in records {
        let disk = &disks[record.disk.index()];
        writer.write(record.time_ns, disk, record.op, record.offset, record.length).expect("to memory");
    }
    let text = writer.finish().expect("to memory");
    let (read, names, error) = read(&text, &TraceOptions::default());
    assert!(error.is_none(), "{error:?}");
    assert_eq!(read.len(), records.len());
    for (read, record) in read.iter().zip(records) {
        let fields_of = |record: &TraceRecord| (record.time_ns, record.op, record.offset, record.length);
        assert_eq!(fields_of(read), fields_of(record));
        assert_eq!(names[read.disk.index()], disks[record.disk.index()]);
    }
}

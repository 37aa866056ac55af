//! Every format as published, and every possible fault of a file.

use std::{
    fmt::Write as _,
    io::{self, Cursor, Read, Write as _},
    path::PathBuf,
};

use proptest::{collection::vec, prelude::*, sample::select};

use super::{
    error::TraceError,
    fuzzing,
    reader::{MAX_WINDOW, TraceReader},
    write::CsvWriter,
    *,
};

/// Formats all records as `time disk op offset length`, followed by the error, if any.
fn summary(mut next: impl FnMut() -> Result<Option<(TraceRecord, String)>, TraceError>) -> String {
    let mut text = String::new();
    loop {
        match next() {
            Ok(Some((record, disk))) => {
                let TraceRecord { time_ns, op, offset, length, .. } = record;
                writeln!(text, "{time_ns} {disk} {} {offset} {length}", op.name()).unwrap();
            }
            Ok(None) => return text,
            Err(error) => writeln!(text, "error: {error}").unwrap(),
        }
    }
}

fn read_from(bytes: impl Read + Send + 'static, options: &TraceOptions) -> String {
    let mut reader = match TraceReader::new("t", Box::new(bytes), options) {
        Ok(reader) => reader,
        Err(error) => return format!("error: {error}\n"),
    };
    summary(|| {
        let record = reader.next()?;
        Ok(record.map(|record| (record, reader.disks()[record.disk.index()].clone())))
    })
}

fn read_with(text: &[u8], options: &TraceOptions) -> String {
    read_from(Cursor::new(text.to_vec()), options)
}

fn read(text: impl AsRef<[u8]>) -> String {
    read_with(text.as_ref(), &TraceOptions::default())
}

fn csv_error(line: &str) -> String {
    let text = read(format!("time_ns,disk,op,offset,length\n0,vm,read,0,512\n{line}\n"));
    text.strip_prefix("0 vm read 0 512\nerror: t:3: ").unwrap_or(&text).trim_end().to_owned()
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    zstd::encode_all(text, 1).unwrap()
}

#[test]
fn weir_csv() {
    let text = "time_ns,disk,op,offset,length\n\
                1000,vm1,read,4096,512\n\
                1000,vm2,write,0,1048576\r\n\
                \n\
                1500,vm1,flush,0,0\n\
                2500,vm1,discard,8192,4096\n\
                18446744073709551615,vm2,write-zeroes,18446744073709551614,1";
    let expected = "0 vm1 read 4096 512\n\
                    0 vm2 write 0 1048576\n\
                    500 vm1 flush 0 0\n\
                    1500 vm1 discard 8192 4096\n\
                    18446744073709550615 vm2 write-zeroes 18446744073709551614 1\n";
    assert_eq!(read(text), expected);
}

#[test]
fn events_file_is_a_trace() {
    let text = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n5,vm1,read,4096,512,6,7,-\n";
    assert_eq!(read(text), "0 vm1 read 4096 512\n");
}

#[test]
fn fio_version_2_times_are_waits() {
    let text = "fio version 2 iolog\n\
                /dev/sdb add\n/tmp/file add\n\
                /dev/sdb open\n\
                /dev/sdb write 4096 8192\n\
                /dev/sdb wait 99 0\n\
                /dev/sdb read 0 512\n\
                /dev/sdb wait 1500 0\n\
                /tmp/file open\n\
                /tmp/file sync 0 0\n\
                /dev/sdb trim 0 65536\n\
                /dev/sdb datasync 0 0\n\
                /dev/sdb close\n";
    let expected = "0 /dev/sdb write 4096 8192\n\
                    0 /dev/sdb read 0 512\n\
                    1500000 /tmp/file flush 0 0\n\
                    1500000 /dev/sdb discard 0 65536\n\
                    1500000 /dev/sdb flush 0 0\n";
    assert_eq!(read(text), expected);
}

/// As written by fio 3.33 at 10 requests a second: the times are microseconds.
#[test]
fn fio_version_3_times_are_microseconds() {
    let text = "fio version 3 iolog\n\
                23 /tmp/f.bin add\n\
                126 /tmp/f.bin open\n\
                131 /tmp/f.bin read 61440 4096\n\
                330 /tmp/f.bin write 774144 4096\n\
                100113 /tmp/f.bin read 880640 4096\n\
                100174 /tmp/f.bin sync 397312 0\n\
                500329 /tmp/f.bin close\n";
    let expected = "0 /tmp/f.bin read 61440 4096\n\
                    199000 /tmp/f.bin write 774144 4096\n\
                    99982000 /tmp/f.bin read 880640 4096\n\
                    100043000 /tmp/f.bin flush 0 0\n";
    assert_eq!(read(text), expected);
    assert_eq!(
        read("fio version 3 iolog\n1 /f wait 5 0\n"),
        "error: t:2: version 3 of fio's iolog has no wait action: every line has a time\n"
    );
}

/// As printed by blkparse 1.2.
const BLKPARSE: &str = "  8,0    0        1     0.000000000   697  Q  WS 223490 + 8 [kjournald]
  8,0    0        2     0.000001000   697  G  WS 223490 + 8 [kjournald]
  8,0    0        3     0.000002000   697  D  WS 223490 + 8 [kjournald]
  8,0    0        4     0.000003000   697  C  WS 223490 + 8 [0]
  8,0    0        5     0.000004000   697  Q  FW [kjournald]
  8,0    0        6     0.000005000   697  Q FWFS 800 + 16 [kjournald]
  8,0    0        7     0.000006000   697  Q   D 1000 + 128 [kjournald]
259,10   0        8     0.000007000   697  Q  RA 2000 + 8 [kjournald]
  8,0    0        9     0.000008000   697  Q   R 36 [kjournald]
  8,0    0       10     0.000008500   697  U   N [kjournald] 1667329125
  8,0    0       11     0.000008600   697  Q   N [kjournald]
  8,0    0       12  1600.000008700   697  Q  RM 5000 + 1 [a b]
kjournald (697)
 Reads Queued:           3,        4KiB\t Writes Queued:           4,       76KiB

CPU0 (sda):
 Reads Queued:           3,        4KiB\t Writes Queued:           4,       76KiB

Throughput (R/W): 0KiB/s / 0KiB/s
Events (sda): 12 entries
Skips: 0 forward (0 -   0.0%)
Input file sda.blktrace.0 added
";

#[test]
fn blkparse_reads_queued_requests() {
    let expected = "0 8,0 write 114426880 4096\n\
                    4000 8,0 flush 0 0\n\
                    5000 8,0 flush 0 0\n\
                    5000 8,0 write 409600 8192\n\
                    6000 8,0 discard 512000 65536\n\
                    7000 259,10 read 1024000 4096\n\
                    1600000008700 8,0 read 2560000 512\n";
    assert_eq!(read(BLKPARSE), expected);
    // The summary begins with a processor unless processes were requested.
    let rest = BLKPARSE.find("kjournald (697)").unwrap()..BLKPARSE.find("CPU0").unwrap();
    let mut text = BLKPARSE.to_owned();
    text.replace_range(rest, "");
    assert_eq!(read(format!("Input file sda.blktrace.0 added\n{text}")), expected);
}

#[test]
fn blkparse_without_queue_events_uses_issue_or_completion() {
    let without = |action: &str| {
        BLKPARSE
            .lines()
            .filter(|line| !line.contains(action))
            .fold(String::new(), |text, line| text + line + "\n")
    };
    assert_eq!(read(without("  697  Q")), "0 8,0 write 114426880 4096\n");
    let completed = "  8,16   0        4     1.000003000     0  C   R 8 + 8 (    2900) [0]\n";
    assert_eq!(read(completed), "0 8,16 read 4096 4096\n");
    let mixed =
        "  8,0 0 1 0.000000000 1 D R 8 + 8 [x]\n".repeat(40_000) + "  8,0 0 2 1.000000000 1 Q R 8 + 8 [x]\n";
    let text = read(mixed);
    assert!(text.ends_with(
        "error: t:40001: an event Q after a mebibyte without one, in which D stood for the \
         requests (print one action only: blkparse -a queue)\n"
    ));
}

#[test]
fn blkparse_with_other_lines() {
    let text = BLKPARSE.replace("  8,0    0        5", "nonsense 8,0\n  8,0    0        5");
    assert_eq!(
        read(text),
        "0 8,0 write 114426880 4096\nerror: t:5: not an event in blkparse's default output\n"
    );
    let text = "  8,0 0 1 0.000000000 1 Q R 8 + 0 [x]\n";
    assert_eq!(read(text), "", "it asks for nothing");
    let text = "  8,0 0 1 0.000000000 1 Q R 36028797018963968 + 8 [x]\n";
    assert_eq!(read(text), "error: t:1: sector 36028797018963968 does not fit into 64 bits of bytes\n");
}

#[test]
fn msr_cambridge_with_and_without_a_header() {
    let lines = "128166372003061629,hm,0,Read,9056702464,24576,41286\n\
                 128166372016382155,hm,1,Write,2822144,4096,703\n";
    let expected = "0 hm.0 read 9056702464 24576\n1332052600 hm.1 write 2822144 4096\n";
    assert_eq!(read(lines), expected);
    assert_eq!(
        read(format!("Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime\n{lines}")),
        expected
    );
    assert_eq!(
        read("128166372003061629,hm,0,Read,9056702464,24576,41286\n128166372016382155,hm,1,Wr"),
        "0 hm.0 read 9056702464 24576\nerror: t:2: the type 'Wr' is neither Read nor Write\n"
    );
}

#[test]
fn alibaba_with_and_without_a_header() {
    let lines = "0,R,126703644672,4096,1577808000000626\n419,W,8192,16384,1577808000001626\n";
    let expected = "0 0 read 126703644672 4096\n1000000 419 write 8192 16384\n";
    assert_eq!(read(lines), expected);
    assert_eq!(read(format!("device_id,opcode,offset,length,timestamp\n{lines}")), expected);
    assert_eq!(
        read("0,R,1,4096,1577808000000626\n0,R,1,4096\n"),
        "0 0 read 1 4096\nerror: t:2: the timestamp is missing (a truncated line?)\n"
    );
}

#[test]
fn cloud_physics_by_its_header() {
    let text = "version,time,op,size,lbn\n\
                1,5633898,2a,512,42932745\n\
                1,5633898,28,6656,40409911\n\
                1,5633899,0,0,0\n\
                1,5633900,35,0,0\n";
    let expected = "0 t write 21981565440 512\n0 t read 20689874432 6656\n2000000000 t flush 0 0\n";
    assert_eq!(read(text), expected);
    assert_eq!(read("lbn,size,op,more,time\n8,512,28,x,7\n"), "0 t read 4096 512\n");
    assert_eq!(
        read("version,time,op,size,lbn\n1,5,2x,512,8\n"),
        "error: t:2: the op '2x' is not a SCSI command in hexadecimal\n"
    );
    let file = |name: &str| {
        let text = "version,time,op,size,lbn\n1,5,28,512,8\n";
        let mut reader =
            TraceReader::new(name, Box::new(Cursor::new(text)), &TraceOptions::default()).unwrap();
        reader.next().unwrap();
        reader.disks()[0].clone()
    };
    assert_eq!(file("/a.b/w01.csv.zst"), "w01");
    assert_eq!(file("standard input"), "standard input");
}

#[test]
fn spc_counts_sectors_and_seconds() {
    let text =
        "0,20941264,8192,W,0.551706\n0, 20939840 ,8192, w, 0.554041\n1,3436288,15872,r,1.011732,more,7\n";
    let expected = "0 0 write 10721927168 8192\n\
                    2335000 0 write 10721198080 8192\n\
                    460026000 1 read 1759379456 15872\n";
    assert_eq!(read(text), expected);
    let message = read("0,1,512,R,0.5\n0,1,512,X,0.6\n");
    assert!(message.ends_with("error: t:2: the opcode 'X' is neither R nor W\n"), "{message}");
}

#[test]
fn mqsim_type_1_is_a_read() {
    let text = "417023 0 8 16 1\n417523 3 0 8 0\n";
    assert_eq!(read(text), "0 0 read 4096 8192\n500 3 write 0 4096\n");
    let message = read("1 0 8 16 1\n2 0 8 16 1 7\n");
    assert!(message.ends_with("error: t:2: the line has more words than the format: '7'\n"), "{message}");
}

fn read_by(columns: &str, text: &str) -> String {
    let columns = Some(columns.parse().unwrap());
    read_with(text.as_bytes(), &TraceOptions { columns, ..TraceOptions::default() })
}

#[test]
fn column_spec_reads_any_text() {
    let text = "when;vm;what;lba;bytes\n10;a;W;8;4096\n12;b;0;0;512\n13;a;FLUSH;;\n";
    let columns = "time=1:us,disk=2,op=3,offset=4:sectors,length=5,separator=semicolon,skip=1,reads=0";
    assert_eq!(read_by(columns, text), "0 a write 4096 4096\n2000 b read 0 512\n3000 a flush 0 0\n");
    let blanks = "  0.5   1  2\n1.25 \t 3 1\n";
    let columns = "time=1:s,offset=2:pages,length=3:KiB,separator=blanks";
    assert_eq!(read_by(columns, blanks), "0 t read 4096 2048\n750000000 t read 12288 1024\n");
    let message = read_by("time=1,offset=2,length=3,op=4", "1,2,3,read\n1,2,3,what\n");
    assert!(
        message.ends_with("error: t:2: the op 'what' is unknown (define it: reads=WORD, writes=WORD)\n"),
        "{message}"
    );
    let message = read_by("time=1,offset=2,length=9", "1,2,3\n");
    assert!(message.ends_with("t:1: the length is missing (a truncated line?)\n"), "{message}");
}

#[test]
fn detected_and_given_format_agree() {
    for (format, text) in [
        (TraceFormat::Weir, "time_ns,disk,op,offset,length\n0,a,read,0,1\n"),
        (TraceFormat::FioV2, "fio version 2 iolog\n/f read 0 1\n"),
        (TraceFormat::FioV3, "fio version 3 iolog\n5 /f read 0 1\n"),
        (TraceFormat::Blkparse, "  8,0 0 1 0.000000000 1 Q R 8 + 8 [x]\n"),
        (TraceFormat::Msr, "1,a,0,read,0,1,0\n"),
        (TraceFormat::Alibaba, "0,R,0,1,5\n"),
        (TraceFormat::CloudPhysics, "version,time,op,size,lbn\n1,5,28,512,8\n"),
        (TraceFormat::Spc, "0,8,512,R,0.5\n"),
        (TraceFormat::Mqsim, "5 0 8 1 1\n"),
    ] {
        let result =
            read_with(text.as_bytes(), &TraceOptions { format: Some(format), ..TraceOptions::default() });
        assert_eq!(result, read(text), "{format:?}");
        assert_eq!(result.lines().count(), 1, "{format:?}");
        let reader = TraceReader::new("t", Box::new(text.as_bytes()), &TraceOptions::default()).unwrap();
        assert_eq!(reader.format, format);
    }
}

#[test]
fn unknown_formats_are_rejected() {
    let known = " (--format names the format, one of weir, fio-v2, fio-v3, blkparse, msr, alibaba, \
                 cloud-physics, spc, mqsim, recording; --columns reads any other text)";
    for (text, hint) in [
        (&b"hello\x1b[31m \xff\nworld"[..], r"its first line is 'hello\x1b[31m \xff'"),
        (b"time_ns,disk,op\n", "its first line is 'time_ns,disk,op'"),
    ] {
        assert_eq!(read(text), format!("error: t: not a trace of a known format: {hint}{known}\n"));
    }
    let tar =
        [&b"t.csv"[..], &[0; 252], b"ustar", &[0; 250], b"version,time,op,size,lbn\n1,5,28,512,8\n"].concat();
    for (bytes, reason) in [
        (&tar[..], "it is a tar archive (extract the trace first: tar -xOf FILE, with - as the trace)"),
        (b"\xfd7zXZ\0\0", "it is compressed with xz (decompress it first: xz -dc FILE, with - as the trace)"),
        (
            b"\x07tae\0\0",
            "it is blktrace's binary form (convert it to text first: blkparse -i FILE, with - as the trace)",
        ),
    ] {
        assert_eq!(read(bytes), format!("error: t: not a trace of a known format: {reason}\n"));
        assert_eq!(read(gzip(bytes)), read(bytes));
    }
    assert_eq!(read(""), "error: t: the trace is empty\n");
    assert_eq!(read("\n \r\n"), "error: t: the trace is empty\n");
    assert_eq!(read(gzip(b"")), "error: t: the trace is empty\n");
    let options = TraceOptions { format: Some(TraceFormat::Weir), ..TraceOptions::default() };
    assert_eq!(
        read_with(b"0,a,read,0,1\n", &options),
        "error: t:1: the header 'time_ns,disk,op,offset,length' is missing\n"
    );
    let options = TraceOptions { format: Some(TraceFormat::FioV3), ..TraceOptions::default() };
    assert_eq!(
        read_with(b"fio version 2 iolog\n", &options),
        "error: t: --format is fio-v3, but the file looks like fio-v2 (leave --format out): \
         t:1: the first line is not 'fio version 3 iolog'\n"
    );
}

#[test]
fn read_error_is_reported() {
    let missing =
        TraceReader::open(&PathBuf::from("/nonexistent/t.csv"), &TraceOptions::default()).err().unwrap();
    assert_eq!(missing.to_string(), "/nonexistent/t.csv: No such file or directory (os error 2)");
    assert!(std::error::Error::source(&missing).is_none(), "nothing is said twice");
    let directory = TraceReader::open(&std::env::temp_dir(), &TraceOptions::default()).err().unwrap();
    assert!(directory.to_string().ends_with("Is a directory (os error 21)"), "{directory}");
    let window = TraceReader::new(
        "t",
        Box::new(&b"x"[..]),
        &TraceOptions { window: MAX_WINDOW + 1, ..TraceOptions::default() },
    );
    assert_eq!(
        window.err().unwrap().to_string(),
        "t: the window of 16777217 records is above the largest, 16777216"
    );
}

#[test]
fn invalid_lines_are_reported() {
    for (line, why) in [
        ("5", "the disk is missing (a truncated line?)"),
        ("5,vm,read,0", "the length is missing (a truncated line?)"),
        ("5,vm,read,0,", "the length is missing (a truncated line?)"),
        ("5,vm,read,0,512,7", "the line has more fields than the format: '7'"),
        ("5,vm,erase,0,512", "the op 'erase' is none of flush, read, write, discard, write-zeroes"),
        ("5,vm,read,-512,512", "the offset '-512' is negative"),
        ("5,vm,read,0,0", "the length of a read is 0"),
        ("5,vm,write-zeroes,0,0", "the length of a write-zeroes is 0"),
        (
            "5,vm,read,18446744073709551615,1",
            "offset 18446744073709551615 and length 1 together do not fit into 64 bits",
        ),
        ("1e9,vm,read,0,512", "the time_ns '1e9' is not a whole number"),
        ("5,,read,0,512", "the disk name is missing"),
        ("5,\u{1b}[1m,read,0,512", r"the disk name '\x1b[1m' is not UTF-8"),
    ] {
        assert_eq!(csv_error(line), why, "{line}");
    }
}

#[test]
fn line_length_is_bounded() {
    let text = [b"time_ns,disk,op,offset,length\n0,vm,read,0,512\n".to_vec(), vec![b'1'; 3 << 20]].concat();
    assert_eq!(read(text), "0 vm read 0 512\nerror: t:3: the line is longer than 65536 bytes\n");
    // The longest name, also across two blocks.
    let name = "n".repeat(4096);
    let line = format!("0,{name},read,0,512\n");
    let text = format!("time_ns,disk,op,offset,length\n{}", line.repeat(600));
    assert_eq!(read(text), format!("0 {name} read 0 512\n").repeat(600));
}

#[test]
fn truncated_compressed_data_is_rejected() {
    let text = format!("time_ns,disk,op,offset,length\n{}", random_lines(200_000));
    for (packed, kind) in [(gzip(text.as_bytes()), "gzip"), (zstd(text.as_bytes()), "zstd")] {
        assert_eq!(read(&packed).lines().count(), 200_000);
        for (length, expected_lines) in [(packed.len() / 2, 50_001..200_001), (200_000, 2..30_000)] {
            let cut = read(&packed[..length]);
            let (records, error) = cut.trim_end().rsplit_once('\n').unwrap();
            let lines = records.lines().count() + 1;
            let expected = format!("error: t: the {kind} data is damaged or truncated after {lines} lines: ");
            assert!(error.starts_with(&expected), "{error}, not {expected}");
            assert!(expected_lines.contains(&lines), "{lines}");
        }
    }
    let packed = gzip(text.as_bytes());
    assert!(
        read(&packed[..5]).starts_with("error: t: the gzip data is damaged or truncated after 0 lines: ")
    );
}

#[test]
fn zstd_window_is_bounded() {
    // RFC 8878, section 3.1.1.1: a window of 2^30 bytes, and one raw block of one byte, the last.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, (30 - 10) << 3, 0b0000_1001, 0, 0, b'x'];
    assert_eq!(
        read(frame),
        "error: t: it was compressed with a zstd window above 128 MiB \
         (decompress it first: zstd -dc --long=31 FILE, and - as the trace)\n"
    );
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, (27 - 10) << 3, 0b0000_1001, 0, 0, b'x'];
    assert!(read(frame).contains("its first line is 'x'"));
}

#[test]
fn gzip_with_several_members() {
    let packed =
        [gzip(b"time_ns,disk,op,offset,length\n1,a,re"), gzip(b"ad,0,512\n2,b,write,0,512\n")].concat();
    assert_eq!(read(packed), "0 a read 0 512\n1 b write 0 512\n");
}

fn random_lines(count: u64) -> String {
    let mut random = fastrand::Rng::with_seed(6);
    let mut time_ns = 0;
    (0..count).fold(String::new(), |mut text, _| {
        time_ns += random.u64(..10_000);
        let (disk, offset) = (random.u32(..10), random.u64(..1 << 40));
        writeln!(text, "{time_ns},vm{disk},read,{offset},4096").unwrap();
        text
    })
}

#[test]
fn window_sorts_records() {
    let window = 500;
    let options = TraceOptions { window, ..TraceOptions::default() };
    let ordered: Vec<String> = random_lines(5000).lines().map(str::to_owned).collect();
    let mut shuffled = ordered.clone();
    let mut random = fastrand::Rng::with_seed(7);
    for block in shuffled.chunks_mut(window) {
        random.shuffle(block);
    }
    let trace = |lines: &[String]| format!("time_ns,disk,op,offset,length\n{}\n", lines.join("\n"));
    assert_ne!(shuffled, ordered);
    assert_eq!(
        read_with(trace(&shuffled).as_bytes(), &options),
        read_with(trace(&ordered).as_bytes(), &options)
    );
}

#[test]
fn late_record_is_an_error_after_all_earlier_records() {
    let options = TraceOptions { window: 10, ..TraceOptions::default() };
    let lines: String = (0..3000).map(|number| format!("{},vm,read,0,512\n", 1000 + number)).collect();
    let text = format!("time_ns,disk,op,offset,length\n{lines}7,vm,read,0,512\n9999,vm,read,0,512\n");
    let read = read_with(text.as_bytes(), &options);
    assert_eq!(read.lines().count(), 3001);
    let error = read.lines().last().unwrap();
    assert!(error.starts_with("error: t:3002: the time 7 ns is before "), "{error}");
    let rest = "displaced by more than 10 records (--window N sorts within a larger window; or \
                sort the trace by time)";
    assert!(error.ends_with(rest), "{error}");
}

#[test]
fn records_of_the_same_time_keep_their_order() {
    let lines: String = (0..3000)
        .map(|number| {
            let time = if number % 3 == 2 { 10 * (number / 300) } else { 10 * (number / 300) + 5 };
            format!("{time},vm,read,{number},512\n")
        })
        .collect();
    let read = read(format!("time_ns,disk,op,offset,length\n{lines}"));
    let keys: Vec<(u64, u64)> = read
        .lines()
        .map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            (fields[0].parse().unwrap(), fields[3].parse().unwrap())
        })
        .collect();
    assert_eq!(keys.len(), 3000);
    assert!(keys.is_sorted(), "sorted by time, and by the number of the line where that is the same");
}

fn merged<T: AsRef<[u8]>>(
    traces: &[(&str, T)],
    absolute_time: impl Into<Option<bool>>,
) -> Result<String, TraceError> {
    let open = |(name, bytes): &(&str, T)| {
        TraceReader::new(name, Box::new(Cursor::new(bytes.as_ref().to_owned())), &TraceOptions::default())
    };
    let readers = traces.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let mut merged = MergedTraces::new(readers, absolute_time.into())?;
    Ok(summary(|| {
        let record = merged.next()?;
        Ok(record.map(|record| {
            let disk = &merged.disks()[record.disk.index()];
            (record, format!("{}={disk}", merged.place(&record)))
        }))
    }))
}

#[test]
fn traces_are_merged_by_time() {
    let csv = "time_ns,disk,op,offset,length\n100,a,read,0,1\n1100,b,read,0,2\n5100,a,read,0,3\n";
    let fio = "fio version 3 iolog\n9 b read 0 4\n10 b read 0 5\n13 c read 0 6\n";
    let expected = "0 x:2=a read 0 1\n\
                    0 y:2=b read 0 4\n\
                    1000 x:3=b read 0 2\n\
                    1000 y:3=b read 0 5\n\
                    4000 y:4=c read 0 6\n\
                    5000 x:4=a read 0 3\n";
    assert_eq!(merged(&[("x", csv), ("y", fio)], false).unwrap(), expected);
    assert_eq!(
        merged(&[("x", csv), ("y", fio)], true).unwrap_err().to_string(),
        "y: times of the format fio-v3 count from the start of the trace, so their distance to \
         other traces is unknown (leave out --absolute-time)"
    );
}

#[test]
fn traces_with_one_clock_keep_their_distance() {
    let early = "128166372003061629,hm,0,Read,0,512,1\n";
    let late = "128166372003061639,usr,1,Write,0,512,1\n";
    assert_eq!(
        merged(&[("late", late), ("early", early)], true).unwrap(),
        "0 early:1=hm.0 read 0 512\n1000 late:1=usr.1 write 0 512\n"
    );
    assert_eq!(
        merged(&[("late", late), ("early", early)], false).unwrap(),
        "0 late:1=usr.1 write 0 512\n0 early:1=hm.0 read 0 512\n"
    );
}

#[test]
fn recordings_keep_their_distance_by_default() {
    let recording = |clock_ns: u64, offset: u64| {
        let mut writer = RecordingWriter::new(Vec::new(), clock_ns).unwrap();
        let (times, op, has_failed, disk, limit) = (None, RequestOp::Read, false, 0, None);
        let entry = RecordingEntry { arrival_ns: 7, times, offset, length: 512, op, has_failed, disk, limit };
        writer.push(entry, || "vm1", || "").unwrap();
        writer.finish().unwrap()
    };
    let hours = [("second", recording(4_000, 2)), ("first", recording(1_000, 1))];
    let expected = "0 first:1=vm1 read 1 512\n3000 second:1=vm1 read 2 512\n";
    assert_eq!(merged(&hours, None).unwrap(), expected);
    assert_eq!(merged(&hours, true).unwrap(), expected);
    assert_eq!(merged(&hours, false).unwrap(), "0 second:1=vm1 read 2 512\n0 first:1=vm1 read 1 512\n");
}

#[test]
fn error_in_one_trace_ends_the_merge() {
    let good = "time_ns,disk,op,offset,length\n1,a,read,0,1\n9,a,read,0,2\n";
    let bad = "time_ns,disk,op,offset,length\n1,a,read,0,3\nx\n";
    let expected = "0 good:2=a read 0 1\n\
                    0 bad:2=a read 0 3\n\
                    error: bad:3: the time_ns 'x' is not a whole number\n";
    assert_eq!(merged(&[("good", good), ("bad", bad)], false).unwrap(), expected);
    assert_eq!(
        merged::<&str>(&[], false).unwrap_err().to_string(),
        "0 traces: between 1 and 65535 traces can be read as one"
    );
    let twice = MergedTraces::open(&["-".into(), "-".into()], &TraceOptions::default()).err().unwrap();
    assert_eq!(twice.to_string(), "-: standard input can be read only once");
}

#[test]
fn name_unfit_for_csv_is_rejected() {
    for name in ["", "a\rb", "a\nb"] {
        let error = CsvWriter::new(Vec::new()).write(0, name, RequestOp::Read, 0, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}

struct PartialReader(Cursor<Vec<u8>>, usize);

impl Read for PartialReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(self.1);
        self.0.read(&mut buffer[..length])
    }
}

fn requests() -> impl Strategy<Value = Vec<(u64, u8, RequestOp, u64, u64)>> {
    let request =
        (0..3_000_000_000u64, 0..9u8, select(&RequestOp::ALL[..]), 0..u64::MAX / 2, 1..u64::MAX / 2);
    vec(request, 0..200)
}

proptest! {
    #[test]
    fn csv_round_trips(requests in requests(), piece in 1..5000usize) {
        let mut now_ns = 7;
        let mut writer = CsvWriter::new(Vec::new());
        let mut expected = String::new();
        for &(later_ns, disk, op, offset, length) in &requests {
            let (offset, length) = if op == RequestOp::Flush { (0, 0) } else { (offset, length) };
            now_ns += if expected.is_empty() { 0 } else { later_ns };
            let disk = ["8,0", "a\"b", "\"", "disk3", "disk4", "disk5", "disk6", "disk7", "8"][usize::from(disk)];
            writer.write(now_ns, disk, op, offset, length).unwrap();
            writeln!(expected, "{} {disk} {} {offset} {length}", now_ns - 7, op.name()).unwrap();
        }
        let text = writer.finish().unwrap();
        for packed in [text.clone(), gzip(&text), zstd(&text)] {
            let pieces = PartialReader(Cursor::new(packed), piece);
            prop_assert_eq!(read_from(pieces, &TraceOptions::default()), expected.as_str());
        }
    }

    #[test]
    fn random_bytes_never_panic_a_reader(data in vec(any::<u8>(), 0..300)) {
        fuzzing::trace(&data);
    }

    #[test]
    fn damaged_traces_never_panic_a_reader(
        choice in any::<u8>(),
        which in 0..5usize,
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        packed in any::<bool>(),
    ) {
        let text = [
            "time_ns,disk,op,offset,length\n1,a,read,0,1\n9,a,flush,0,0\n4,b,write,0,2\n",
            "fio version 3 iolog\n9 b read 0 4\n10 b sync 0 0\n13 c trim 0 6\n",
            BLKPARSE,
            "128166372003061629,hm,0,Read,0,512,1\n128166372003061629,hm,0,Write,0,512,1\n",
            "version,time,op,size,lbn\n1,5,28,512,8\n1,6,35,0,0\n",
        ][which];
        let mut bytes = text.as_bytes().to_vec();
        if packed {
            bytes = gzip(&bytes);
        }
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.insert(0, choice);
        fuzzing::trace(&bytes);
    }
}

//! Counters of a disk since the machine started, from the kernel; of an imitated disk since it was
//! created.
//!
//! The fields are those of the kernel's Documentation/block/stat.rst. Requests are counted at the
//! device, after merging and splitting, on completion.

use std::{fs, io, os::unix::fs::FileExt as _, path::Path};

use policy::counter;

/// Maximum length of a line of statistics, in bytes; a line of 17 numbers has at most 360.
const MAX_LINE_BYTES: usize = 512;
/// Unit of the kernel's sectors, whatever the disk's sector size.
const SECTOR_BYTES: u64 = 512;

/// Totals at one moment. The kernel keeps the times in 32 bits, which wrap around after 49 days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatistics {
    /// Completed reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Completed writes.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time with a request in flight, in milliseconds.
    pub busy_ms: u64,
    /// Sum of the times of all requests in flight, in milliseconds.
    pub queued_ms: u64,
}

impl DeviceStatistics {
    /// Parses the text of a `stat` file; `None` if it is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = [0; 11];
        let mut numbers = text.split_ascii_whitespace();
        for field in &mut fields {
            *field = numbers.next()?.parse().ok()?;
        }
        // In the order of Documentation/block/stat.rst; merges, wait times and later fields are not
        // used.
        let [reads, _, read_sectors, _, writes, _, written_sectors, _, _, busy_ms, queued_ms] = fields;
        Some(Self {
            reads,
            read_bytes: read_sectors.wrapping_mul(SECTOR_BYTES),
            writes,
            written_bytes: written_sectors.wrapping_mul(SECTOR_BYTES),
            busy_ms,
            queued_ms,
        })
    }

    /// Growth since an earlier moment; `None` if a total decreased, which means that it is another
    /// disk.
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        let [reads, read_bytes, writes, written_bytes] =
            counter::growths(&earlier.counters(), &self.counters())?;
        Some(Self {
            reads,
            read_bytes,
            writes,
            written_bytes,
            busy_ms: counter::growth_of_32_bits(earlier.busy_ms, self.busy_ms)?,
            queued_ms: counter::growth_of_32_bits(earlier.queued_ms, self.queued_ms)?,
        })
    }

    const fn counters(&self) -> [u64; 4] {
        [self.reads, self.read_bytes, self.writes, self.written_bytes]
    }
}

/// A disk's `stat` file, kept open because it is read twenty times a second.
#[derive(Debug)]
pub struct StatisticsFile(fs::File);

impl StatisticsFile {
    /// Opens the file of the disk with this directory in sysfs.
    ///
    /// # Errors
    /// As reported by the system.
    pub fn open(directory: &Path) -> io::Result<Self> {
        fs::File::open(directory.join("stat")).map(Self)
    }

    /// Reads the totals. Blocks for some microseconds, in which the kernel adds them up.
    ///
    /// # Errors
    /// The disk is gone, or the file has another format.
    pub fn read(&self) -> io::Result<DeviceStatistics> {
        let mut line = [0; MAX_LINE_BYTES];
        let length = self.0.read_at(&mut line, 0)?;
        let text = std::str::from_utf8(&line[..length]).ok();
        text.and_then(DeviceStatistics::parse)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not the statistics of a block device"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_line_is_read() {
        let line = "  52651224   498008 909194616 21989284 24055264   385425 309426526  \
                    3428620        0  1817668 25603797   165247       11 63372400   174993    \
                    93551    10899\n";
        let expect = DeviceStatistics {
            reads: 52_651_224,
            read_bytes: 909_194_616 * 512,
            writes: 24_055_264,
            written_bytes: 309_426_526 * 512,
            busy_ms: 1_817_668,
            queued_ms: 25_603_797,
        };
        assert_eq!(DeviceStatistics::parse(line), Some(expect));
        for broken in ["", "1 2 3", "1 2 3 4 5 6 7 8 9 10 x", "-1 2 3 4 5 6 7 8 9 10 11"] {
            assert_eq!(DeviceStatistics::parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn times_wrap_and_other_totals_that_fall_are_of_another_disk() {
        let (before, after) = (u64::from(u32::MAX), 7);
        let before = DeviceStatistics {
            reads: 4,
            busy_ms: before,
            queued_ms: before - 10,
            ..DeviceStatistics::default()
        };
        let after =
            DeviceStatistics { reads: 9, busy_ms: after, queued_ms: after, ..DeviceStatistics::default() };
        let done = DeviceStatistics { reads: 5, busy_ms: 8, queued_ms: 18, ..DeviceStatistics::default() };
        assert_eq!(after.since(&before), Some(done));
        assert_eq!(before.since(&after), None);
        assert_eq!(DeviceStatistics { reads: 3, ..after }.since(&before), None);
    }

    #[test]
    fn a_source_is_read_again_and_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |reads| {
            fs::write(directory.path().join("stat"), format!("{reads} 0 8 0 0 0 0 0 0 5 6"))
                .expect("written");
        };
        write(1);
        let source = StatisticsFile::open(directory.path()).expect("there");
        assert_eq!(source.read().expect("a line").reads, 1);
        write(2);
        assert_eq!(
            source.read().expect("a line"),
            DeviceStatistics {
                reads: 2,
                read_bytes: 4096,
                busy_ms: 5,
                queued_ms: 6,
                ..DeviceStatistics::default()
            }
        );
        fs::write(directory.path().join("stat"), "").expect("written");
        assert!(source.read().is_err());
    }
}
